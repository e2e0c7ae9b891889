/* One short request to each of several servers in one call, and their short answers in another.
 *
 * A frame is 64 bytes of header, metadata, payload (`frames.py`). Only lengths are looked at here.
 * `tests/embedding/rows_driver.c` runs these functions under sanitizers, without Python. */
#ifndef SHOAL_WITHOUT_PYTHON
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { HEADER = 64, PAYLOAD_AT = 48, META_AT = 56, MAX_META = 1 << 20, FIRST = 4096, MAX_BUFFERS = 4 };
enum { INTERRUPTED = -1 };

typedef struct {
    int fd, error; /* errno, or INTERRUPTED */
    struct iovec parts[MAX_BUFFERS];
    int num_parts;
    uint8_t *answer; /* at least FIRST bytes, of malloc */
    size_t answer_bytes;
} Exchange;

/* Whether a system call that was interrupted is made again. */
static int (*goes_on)(void);

static int failed(Exchange *e, int error) {
    e->error = error;
    return 0;
}

static int send_request(Exchange *e) {
    struct iovec *part = e->parts, *end = e->parts + e->num_parts;
    for (;;) {
        for (; part < end && !part->iov_len; part++) {}
        if (part == end) return 1;
        struct msghdr message = {.msg_iov = part, .msg_iovlen = (size_t)(end - part)};
        ssize_t sent = sendmsg(e->fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EINTR) return failed(e, errno);
            if (!goes_on()) return failed(e, INTERRUPTED);
            continue;
        }
        for (; part < end && (size_t)sent >= part->iov_len; part++) sent -= (ssize_t)part->iov_len;
        if (part < end) {
            part->iov_base = (uint8_t *)part->iov_base + sent;
            part->iov_len -= (size_t)sent;
        }
    }
}

/* The bytes of the frame of which at least a header is there; 0 if it is too long, or has a payload. */
static size_t frame_bytes(const uint8_t *header) {
    uint64_t payload = 0;
    uint32_t meta = 0;
    for (int i = 7; i >= 0; i--) payload = payload << 8 | header[PAYLOAD_AT + i];
    for (int i = 3; i >= 0; i--) meta = meta << 8 | header[META_AT + i];
    return payload || meta > MAX_META ? 0 : HEADER + (size_t)meta;
}

static int receive_answer(Exchange *e) {
    size_t room = FIRST, wanted = HEADER;
    while (e->answer_bytes < wanted) {
        ssize_t got = recv(e->fd, e->answer + e->answer_bytes, room - e->answer_bytes, 0);
        if (got < 0 && errno == EINTR) {
            if (!goes_on()) return failed(e, INTERRUPTED);
            continue;
        }
        if (got <= 0) return failed(e, got ? errno : ECONNRESET);
        e->answer_bytes += (size_t)got;
        if (e->answer_bytes < HEADER) continue;
        wanted = frame_bytes(e->answer);
        if (!wanted || e->answer_bytes > wanted) return failed(e, EPROTO);
        if (wanted > room) {
            uint8_t *larger = realloc(e->answer, wanted);
            if (!larger) return failed(e, ENOMEM);
            e->answer = larger;
            room = wanted;
        }
    }
    return 1;
}

/* Requests to all, or until a signal ends the call: a server that has failed may have sent the reason. */
static void send_all(Exchange *all, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!send_request(&all[i]) && all[i].error == INTERRUPTED) return;
}

/* Ends after the first server that has failed; what others have sent is not read then. `*awaited` is the one that
 * is waited for. */
static void receive_all(Exchange *all, size_t count, int64_t *awaited) {
    for (size_t i = 0; i < count; i++) {
        __atomic_store_n(awaited, (int64_t)i, __ATOMIC_RELAXED);
        if (!receive_answer(&all[i])) return;
    }
}

#ifndef SHOAL_WITHOUT_PYTHON
static int signals_passed(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised == 0;
}

/* What a call works with: one more than there are requests, so that none is no error. */
static Exchange *exchanges(PyObject *list) {
    Exchange *all = NULL;
    if (!PyList_Check(list)) PyErr_SetString(PyExc_TypeError, "a list is needed");
    else if (!(all = calloc((size_t)PyList_GET_SIZE(list) + 1, sizeof *all))) PyErr_NoMemory();
    return all;
}

/* (descriptor, buffer, buffer, …) */
static int take_request(Exchange *e, Py_buffer *views, size_t *num_views, PyObject *request) {
    Py_ssize_t size = PyTuple_Check(request) ? PyTuple_GET_SIZE(request) : 0;
    if (size < 2 || size > 1 + MAX_BUFFERS) {
        PyErr_SetString(PyExc_TypeError, "a request is a tuple of a descriptor and one to four buffers");
        return 0;
    }
    e->fd = (int)PyLong_AsLong(PyTuple_GET_ITEM(request, 0));
    if (PyErr_Occurred()) return 0;
    for (Py_ssize_t i = 1; i < size; i++) {
        Py_buffer *view = &views[*num_views];
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(request, i), view, PyBUF_SIMPLE) != 0) return 0;
        ++*num_views;
        e->parts[e->num_parts++] = (struct iovec){view->buf, (size_t)view->len};
    }
    return 1;
}

/* A list of requests; returns the errno of each, 0 for those that were sent. */
static PyObject *py_send(PyObject *self, PyObject *requests) {
    (void)self;
    PyObject *errors = NULL;
    Exchange *all = exchanges(requests);
    if (!all) return NULL;
    size_t num_views = 0, count = 0, most = (size_t)PyList_GET_SIZE(requests);
    Py_buffer *views = calloc(most * MAX_BUFFERS + 1, sizeof *views);
    if (!views) PyErr_NoMemory();
    while (!PyErr_Occurred() && count < most && count < (size_t)PyList_GET_SIZE(requests))
        if (take_request(&all[count], views, &num_views, PyList_GET_ITEM(requests, (Py_ssize_t)count))) count++;
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        send_all(all, count);
        Py_END_ALLOW_THREADS
    }
    if (!PyErr_Occurred()) errors = PyList_New(0);
    for (size_t i = 0; errors && i < count; i++) {
        PyObject *error = PyLong_FromLong(all[i].error);
        if (!error || PyList_Append(errors, error) != 0) Py_CLEAR(errors);
        Py_XDECREF(error);
    }
    for (size_t i = 0; i < num_views; i++) PyBuffer_Release(&views[i]);
    free(views);
    free(all);
    return errors;
}

/* Answers as bytes, up to the server that has failed: its errno stands there. */
static PyObject *answers_of(const Exchange *all, size_t count) {
    PyObject *answers = PyList_New(0);
    for (size_t i = 0; answers && i < count; i++) {
        const Exchange *e = &all[i];
        PyObject *answer = e->error ? PyLong_FromLong(e->error)
                                    : PyBytes_FromStringAndSize((const char *)e->answer, (Py_ssize_t)e->answer_bytes);
        if (!answer || PyList_Append(answers, answer) != 0) Py_CLEAR(answers);
        Py_XDECREF(answer);
        if (e->error) break;
    }
    return answers;
}

/* a list of descriptors, and one int64 for the position of the one that is waited for */
static PyObject *py_receive(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    (void)self;
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "2 arguments are needed, not %zd", num_args);
    PyObject *answers = NULL;
    Py_buffer awaited;
    if (PyObject_GetBuffer(args[1], &awaited, PyBUF_WRITABLE) != 0) return NULL;
    Exchange *all = awaited.len == sizeof(int64_t) ? exchanges(args[0]) : NULL;
    size_t count = 0, most = all ? (size_t)PyList_GET_SIZE(args[0]) : 0;
    if (!all && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one int64 is needed");
    for (; !PyErr_Occurred() && count < most; count++) {
        all[count].fd = (int)PyLong_AsLong(PyList_GET_ITEM(args[0], (Py_ssize_t)count));
        if (!(all[count].answer = malloc(FIRST))) PyErr_NoMemory();
    }
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        receive_all(all, count, awaited.buf);
        Py_END_ALLOW_THREADS
        if (!PyErr_Occurred()) answers = answers_of(all, count);
    }
    for (size_t i = 0; i < count; i++) free(all[i].answer);
    free(all);
    PyBuffer_Release(&awaited);
    return answers;
}

static PyMethodDef methods[] = {{"send", py_send, METH_O, NULL},
                                {"receive", (PyCFunction)(void (*)(void))py_receive, METH_FASTCALL, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frames", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__frames(void) {
    goes_on = signals_passed;
    return PyModule_Create(&module);
}
#endif
