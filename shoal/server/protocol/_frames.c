/* One short request to each of several servers in one call, and their answers in another: short ones, or rows that
 * go straight to their places.
 *
 * A frame is 64 bytes of header, metadata, payload (`frames.py`). Only lengths are looked at here.
 * `tests/server/embedding/rows_driver.c` runs these functions under sanitizers, without Python. */
#ifndef SHOAL_WITHOUT_PYTHON
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { HEADER = 64, PAYLOAD_AT = 48, META_AT = 56, MAX_META = 1 << 20, FIRST = 4096, MAX_BUFFERS = 4 };
enum { INTERRUPTED = -1 };
enum { ROWS_AT_ONCE = 256, LOW_WATER = 128 << 10 };

typedef struct {
    int fd, error; /* errno, or INTERRUPTED */
    struct iovec parts[MAX_BUFFERS];
    int num_parts;
    uint8_t *answer; /* at least FIRST bytes, of malloc */
    size_t answer_bytes;
    const uint64_t *places; /* of the rows that come with the answer */
    size_t num_places;
    size_t row_bytes_done;
} Exchange;

/* Where rows go. */
typedef struct {
    uint8_t *rows;
    size_t num_rows, row_bytes;
} Target;

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

static uint64_t payload_bytes(const uint8_t *header) {
    uint64_t payload = 0;
    for (int i = 7; i >= 0; i--) payload = payload << 8 | header[PAYLOAD_AT + i];
    return payload;
}

static uint32_t meta_bytes(const uint8_t *header) {
    uint32_t meta = 0;
    for (int i = 3; i >= 0; i--) meta = meta << 8 | header[META_AT + i];
    return meta;
}

/* The bytes of the frame of which at least a header is there; 0 if it is too long, or has a payload. */
static size_t frame_bytes(const uint8_t *header) {
    uint64_t payload = payload_bytes(header);
    uint32_t meta = meta_bytes(header);
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

/* ------------------------------------------------------------------ rows */

/* What is missing of the answer: bytes of header and metadata, then of rows; -1 if it is not as expected. An answer
 * without rows is an error, which the caller reads. */
static ssize_t missing_bytes(Exchange *e, const Target *target, int *of_rows) {
    *of_rows = 0;
    if (e->answer_bytes < HEADER) return (ssize_t)(HEADER - e->answer_bytes);
    uint64_t payload = payload_bytes(e->answer);
    uint32_t meta = meta_bytes(e->answer);
    if (meta > MAX_META || (payload && payload != (uint64_t)e->num_places * target->row_bytes)) return -1;
    if (e->answer_bytes < HEADER + (size_t)meta) {
        if (HEADER + (size_t)meta > FIRST && e->answer_bytes == HEADER) {
            uint8_t *larger = realloc(e->answer, HEADER + (size_t)meta);
            if (!larger) return -1;
            e->answer = larger;
        }
        return (ssize_t)(HEADER + meta - e->answer_bytes);
    }
    *of_rows = 1;
    return (ssize_t)(payload - e->row_bytes_done);
}

/* Memory for the next rows; returns how many pieces it has. */
static size_t next_rows(const Exchange *e, const Target *target, struct iovec *pieces) {
    size_t row = e->row_bytes_done / target->row_bytes, within = e->row_bytes_done % target->row_bytes, count = 0;
    for (; row < e->num_places && count < ROWS_AT_ONCE; row++, within = 0) {
        uint8_t *at = target->rows + e->places[row] * target->row_bytes;
        if (count && (uint8_t *)pieces[count - 1].iov_base + pieces[count - 1].iov_len == at)
            pieces[count - 1].iov_len += target->row_bytes;
        else
            pieces[count++] = (struct iovec){at + within, target->row_bytes - within};
    }
    return count;
}

/* Fewer wake-ups: poll reports a socket when so many bytes are there. Without effect on sockets that cannot. */
static void wait_for(int fd, ssize_t num_bytes) {
    int low = num_bytes < LOW_WATER ? (int)num_bytes : LOW_WATER;
    setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
}

/* Read what is there. Returns 1 when the answer is complete or has failed, and 0 when more is to come. */
static int read_rows(Exchange *e, const Target *target) {
    struct iovec pieces[ROWS_AT_ONCE];
    for (;;) {
        int of_rows;
        ssize_t missing = missing_bytes(e, target, &of_rows);
        if (missing < 0) return !failed(e, EPROTO);
        if (!missing) return 1;
        struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 1};
        pieces[0] = (struct iovec){e->answer + e->answer_bytes, (size_t)missing};
        if (of_rows) message.msg_iovlen = next_rows(e, target, pieces);
        ssize_t got = recvmsg(e->fd, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            wait_for(e->fd, missing);
            return 0;
        }
        if (got <= 0) return !failed(e, got ? errno : ECONNRESET);
        *(of_rows ? &e->row_bytes_done : &e->answer_bytes) += (size_t)got;
    }
}

/* Answers of all, whichever comes first; those of others are read where one has failed. `*awaited` is the first that
 * is waited for. `polled` has room for all. */
static void receive_rows(Exchange *all, size_t count, const Target *target, struct pollfd *polled, int64_t *awaited) {
    for (size_t i = 0; i < count; i++) polled[i] = (struct pollfd){.fd = all[i].fd, .events = POLLIN, .revents = POLLIN};
    for (;;) {
        size_t pending = 0;
        for (size_t i = 0; i < count; i++) {
            if (polled[i].fd < 0) continue;
            if (polled[i].revents && read_rows(&all[i], target)) {
                wait_for(all[i].fd, 1);
                polled[i].fd = -1;
            } else if (!pending++) {
                __atomic_store_n(awaited, (int64_t)i, __ATOMIC_RELAXED);
            }
        }
        if (!pending) return;
        if (poll(polled, (nfds_t)count, -1) < 0 && (errno != EINTR || !goes_on())) {
            int error = errno == EINTR ? INTERRUPTED : errno;
            for (size_t i = 0; i < count; i++)
                if (polled[i].fd >= 0) failed(&all[i], error);
            return;
        }
    }
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

/* (descriptor, places int64); `views` has the places */
static int take_answer(Exchange *e, Py_buffer *view, PyObject *asked, const Target *target) {
    if (!PyTuple_Check(asked) || PyTuple_GET_SIZE(asked) != 2) {
        PyErr_SetString(PyExc_TypeError, "a descriptor and places are needed");
        return 0;
    }
    e->fd = (int)PyLong_AsLong(PyTuple_GET_ITEM(asked, 0));
    if (PyErr_Occurred() || PyObject_GetBuffer(PyTuple_GET_ITEM(asked, 1), view, PyBUF_SIMPLE) != 0) return 0;
    e->places = view->buf;
    e->num_places = (size_t)view->len / sizeof *e->places;
    for (size_t i = 0; i < e->num_places; i++)
        if (e->places[i] >= target->num_rows) PyErr_SetString(PyExc_IndexError, "a place is out of range");
    if (!PyErr_Occurred() && !(e->answer = malloc(FIRST))) PyErr_NoMemory();
    if (!PyErr_Occurred()) return 1;
    PyBuffer_Release(view);
    return 0;
}

/* A list of what was asked, the memory of all rows, bytes of a row, and one int64 for the position of the one that is
 * waited for. Returns the answers without their rows, or the errno of those that have failed. */
static PyObject *py_receive_rows(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    (void)self;
    if (num_args != 4) return PyErr_Format(PyExc_TypeError, "4 arguments are needed, not %zd", num_args);
    PyObject *answers = NULL;
    Py_buffer rows, awaited;
    size_t row_bytes = PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[1], &rows, PyBUF_WRITABLE) != 0) return NULL;
    if (PyObject_GetBuffer(args[3], &awaited, PyBUF_WRITABLE) != 0) {
        PyBuffer_Release(&rows);
        return NULL;
    }
    Target target = {rows.buf, row_bytes ? (size_t)rows.len / row_bytes : 0, row_bytes};
    Exchange *all = awaited.len == sizeof(int64_t) && row_bytes ? exchanges(args[0]) : NULL;
    size_t count = 0, most = all ? (size_t)PyList_GET_SIZE(args[0]) : 0;
    Py_buffer *views = calloc(most + 1, sizeof *views);
    struct pollfd *polled = calloc(most + 1, sizeof *polled);
    if (!views || !polled) PyErr_NoMemory();
    if (!all && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one int64 and the bytes of a row are needed");
    while (!PyErr_Occurred() && count < most)
        if (take_answer(&all[count], &views[count], PyList_GET_ITEM(args[0], (Py_ssize_t)count), &target)) count++;
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        receive_rows(all, count, &target, polled, awaited.buf);
        Py_END_ALLOW_THREADS
        if (!PyErr_Occurred()) answers = PyList_New((Py_ssize_t)count);
    }
    for (size_t i = 0; answers && i < count; i++) {
        const Exchange *e = &all[i];
        PyObject *answer = e->error ? PyLong_FromLong(e->error)
                                    : PyBytes_FromStringAndSize((const char *)e->answer, (Py_ssize_t)e->answer_bytes);
        if (answer) PyList_SET_ITEM(answers, (Py_ssize_t)i, answer);
        else Py_CLEAR(answers);
    }
    for (size_t i = 0; i < count; i++) {
        free(all[i].answer);
        PyBuffer_Release(&views[i]);
    }
    free(polled);
    free(views);
    free(all);
    PyBuffer_Release(&awaited);
    PyBuffer_Release(&rows);
    return answers;
}

static PyMethodDef methods[] = {{"send", py_send, METH_O, NULL},
                                {"receive", (PyCFunction)(void (*)(void))py_receive, METH_FASTCALL, NULL},
                                {"receive_rows", (PyCFunction)(void (*)(void))py_receive_rows, METH_FASTCALL, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frames", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__frames(void) {
    goes_on = signals_passed;
    return PyModule_Create(&module);
}
#endif
