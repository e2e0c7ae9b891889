/* The engine for Python: handles are capsules, operations are addresses. See engine.h.
 * The context of a handle is a dict of the tensors whose memory operations use, by operation. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"

#define NAME "shoal.comm.transport.tcp.engine"

static void abandon(PyObject *capsule) {
    Engine *e = PyCapsule_IsValid(capsule, NAME) ? PyCapsule_GetPointer(capsule, NAME) : NULL;
    if (!e) return;
    stop(e);
    destroy(e);
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
}

static Engine *engine_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, NAME); }

static PyObject *py_create(PyObject *self, PyObject *args) {
    (void)self;
    int rank, size;
    if (!PyArg_ParseTuple(args, "ii", &rank, &size)) return NULL;
    if (size < 1 || size > 1 << 16 || rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "rank %d of %d", rank, size);
    PyObject *tensors = PyDict_New();
    Engine *e = tensors ? create(rank, size) : NULL;
    PyObject *capsule = e ? PyCapsule_New(e, NAME, abandon) : NULL;
    if (capsule && PyCapsule_SetContext(capsule, tensors) == 0) return capsule;
    Py_XDECREF(tensors);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static PyObject *py_add_peer(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *numbers;
    int peer, fds[MAX_STREAMS];
    if (!PyArg_ParseTuple(args, "OiO!", &capsule, &peer, &PyTuple_Type, &numbers)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(numbers);
    if (peer < 0 || peer >= e->size || peer == e->rank || count < 1 || count > MAX_STREAMS)
        return PyErr_Format(PyExc_ValueError, "%zd streams to rank %d of %d", count, peer, e->size);
    for (Py_ssize_t i = 0; i < count; i++) fds[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(numbers, i));
    if (PyErr_Occurred()) return NULL;
    if (!add_peer(e, peer, fds, (int)count))
        return PyErr_Format(PyExc_ValueError, "rank %d has its streams already, or no memory", peer);
    Py_RETURN_NONE;
}

static PyObject *py_post(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *tensor;
    int is_send, peer, dtype, operator;
    unsigned long long bytes, tag;
    unsigned int space;
    const char *descriptor;
    Py_ssize_t descriptor_bytes;
    if (!PyArg_ParseTuple(args, "OiOKiIKy#ii", &capsule, &is_send, &tensor, &bytes, &peer, &space, &tag,
                          &descriptor, &descriptor_bytes, &dtype, &operator))
        return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    if (peer >= e->size || peer == e->rank || (peer < 0 && is_send))
        return PyErr_Format(PyExc_ValueError, "rank %d has no connection to rank %d", e->rank, peer);
    if (descriptor_bytes > MAX_DESCRIPTOR || !can_combine(dtype, operator))
        return PyErr_Format(PyExc_ValueError, "this tensor cannot be sent");
    PyObject *address = PyObject_CallMethod(tensor, "data_ptr", NULL);
    u8 *data = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    if (PyErr_Occurred()) return NULL;
    Op *op = calloc(1, sizeof *op);
    PyObject *number = op ? PyLong_FromVoidPtr(op) : PyErr_NoMemory();
    if (!number || PyDict_SetItem(PyCapsule_GetContext(capsule), number, tensor) != 0) {
        Py_XDECREF(number);
        free(op);
        return NULL;
    }
    op->is_send = is_send;
    op->data = data;
    op->bytes = bytes;
    op->peer = peer < 0 ? -1 : peer;
    op->space = space;
    op->tag = tag;
    op->dtype = dtype;
    op->operator = operator < 0 ? COPY : operator;
    op->descriptor_bytes = (u32)descriptor_bytes;
    memcpy(op->descriptor, descriptor, (size_t)descriptor_bytes);
    Py_BEGIN_ALLOW_THREADS
    post(e, op);
    Py_END_ALLOW_THREADS
    return number;
}

static PyObject *py_state(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *number;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &number)) return NULL;
    Engine *e = engine_of(capsule);
    Op *op = PyLong_AsVoidPtr(number);
    if (!e || !op) return NULL;
    return PyLong_FromLong(state_of(e, op));
}

/* (outcome, the other rank, why it was lost, its descriptor); LATE: the operation is given up */
static PyObject *py_wait(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *number;
    unsigned long long timeout_ns;
    if (!PyArg_ParseTuple(args, "OOK", &capsule, &number, &timeout_ns)) return NULL;
    Engine *e = engine_of(capsule);
    Op *op = PyLong_AsVoidPtr(number);
    if (!e || !op) return NULL;
    u64 until = now_ns() + timeout_ns;
    int state = state_of(e, op);
    while (state < 0) {
        u64 now = now_ns();
        if (now >= until) {
            state = expire(e, op);
            break;
        }
        Py_BEGIN_ALLOW_THREADS
        state = wait_for(e, op, least(SLICE_NS, until - now));
        Py_END_ALLOW_THREADS
        if (state < 0 && PyErr_CheckSignals()) return NULL;
    }
    return Py_BuildValue("iiiy#", state, op->source, op->why, op->descriptor,
                         (Py_ssize_t)op->descriptor_bytes);
}

static PyObject *py_forget(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *number;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &number)) return NULL;
    Engine *e = engine_of(capsule);
    Op *op = PyLong_AsVoidPtr(number);
    if (!e || !op) return NULL;
    forget(e, op);
    if (PyDict_DelItem(PyCapsule_GetContext(capsule), number) != 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_abort(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned int space;
    if (!PyArg_ParseTuple(args, "OI", &capsule, &space)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    leave_space(e, space);
    Py_RETURN_NONE;
}

/* A peer that is known to be lost, though its connections say nothing. */
static PyObject *py_lose(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    int peer;
    if (!PyArg_ParseTuple(args, "Oi", &capsule, &peer)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    enter(e);
    if (!e->closing && peer >= 0 && peer < e->size && !e->peers[peer].is_lost) {
        e->peers[peer].why = EHOSTUNREACH;
        e->peers[peer].deadline_ns = 1; /* the serving thread closes it: it may poll it now */
        wake(e);
    }
    leave(e);
    Py_RETURN_NONE;
}

/* Whether a receive from any source would have its message now, or fail at once. */
static PyObject *py_has_any(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    Op asked = {.peer = -1};
    unsigned long long tag;
    if (!PyArg_ParseTuple(args, "OIK", &capsule, &asked.space, &tag)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    asked.tag = tag;
    return PyBool_FromLong(has_any(e, &asked));
}

static PyObject *py_stop(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "O", &capsule)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    Py_BEGIN_ALLOW_THREADS
    stop(e);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"create", py_create, METH_VARARGS, NULL}, {"add_peer", py_add_peer, METH_VARARGS, NULL},
    {"post", py_post, METH_VARARGS, NULL},     {"state", py_state, METH_VARARGS, NULL},
    {"wait", py_wait, METH_VARARGS, NULL},     {"forget", py_forget, METH_VARARGS, NULL},
    {"abort", py_abort, METH_VARARGS, NULL},   {"stop", py_stop, METH_VARARGS, NULL},
    {"lose", py_lose, METH_VARARGS, NULL},     {"has_any", py_has_any, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tcp", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tcp(void) { return PyModule_Create(&module); }
