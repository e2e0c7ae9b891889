/* The sum of ranges of numbers in the memory of several processes of one host.

   Gradients stay where backward has put them; who owns a slice reads it from each process
   (process_vm_readv), block by block into its cache, and adds it up in the order of ranks. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../transport/arithmetic.h"

#define BLOCK (128 << 10)
#define MOST_THREADS 64

typedef struct {
    const u64 *pids, *addresses, *runs; /* addresses[rank][run]; runs: (start, stop) in elements */
    u64 ranks, me, count, from, first, last; /* out[0] is element `from`; this thread: first to last */
    int dtype;
    u8 *out;
    u64 lost; /* 1 + the rank that could not be read */
    int error;
} Part;

static int read_from(u64 pid, u8 *into, u64 address, u64 bytes) {
    while (bytes) {
        struct iovec here = {into, bytes}, there = {(void *)(uintptr_t)address, bytes};
        ssize_t done = process_vm_readv((pid_t)pid, &here, 1, &there, 1, 0);
        if (done <= 0) return done < 0 ? errno : EFAULT;
        into += done;
        address += (u64)done;
        bytes -= (u64)done;
    }
    return 0;
}

static void add_block(Part *part, u8 *scratch, u64 run, u64 start, u64 stop) {
    u64 each = ELEMENT_BYTES[part->dtype], n = stop - start;
    u64 offset = (start - part->runs[2 * run]) * each;
    u8 *out = part->out + (start - part->from) * each;
    for (u64 rank = 0; rank < part->ranks; rank++) {
        u64 address = part->addresses[rank * part->count + run] + offset;
        const u8 *in = (const u8 *)(uintptr_t)address;
        if (rank != part->me) {
            part->error = read_from(part->pids[rank], rank ? scratch : out, address, n * each);
            if (part->error) {
                part->lost = rank + 1;
                return;
            }
            in = rank ? scratch : out;
        }
        const u8 *both[2] = {out, in};
        if (rank) combine_all(part->dtype, SUM, out, NULL, both, 2, n);
        else if (in != out) memcpy(out, in, n * each);
    }
}

static void *add_part(void *argument) {
    Part *part = argument;
    u8 *scratch = aligned_alloc(LINE, BLOCK);
    u64 step = BLOCK / ELEMENT_BYTES[part->dtype];
    if (!scratch) part->error = ENOMEM;
    for (u64 run = 0; run < part->count && !part->error; run++) {
        u64 start = part->runs[2 * run], stop = part->runs[2 * run + 1];
        if (start < part->first) start = part->first;
        if (stop > part->last) stop = part->last;
        for (; start < stop && !part->error; start += step)
            add_block(part, scratch, run, start, stop - start < step ? stop : start + step);
    }
    free(scratch);
    return NULL;
}

/* add(out, dtype, pids, addresses, runs, ranks, me, count, start, stop, threads) -> (errno, 1 + rank) */
static PyObject *py_add(PyObject *self, PyObject *args) {
    unsigned long long out, pids, addresses, runs, ranks, me, count, start, stop, threads;
    int dtype;
    if (!PyArg_ParseTuple(args, "KiKKKKKKKKK", &out, &dtype, &pids, &addresses, &runs, &ranks, &me,
                          &count, &start, &stop, &threads))
        return NULL;
    Part parts[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    int runs_apart[MOST_THREADS] = {0};
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 1) threads = 1;
    Py_BEGIN_ALLOW_THREADS
    u64 each = ((stop - start) / threads + 15) & ~15ull;
    for (u64 t = 0; t < threads; t++) {
        u64 first = start + t * each, last = first + each;
        parts[t] = (Part){(u64 *)(uintptr_t)pids, (u64 *)(uintptr_t)addresses, (u64 *)(uintptr_t)runs,
                          ranks, me, count, start, first < stop ? first : stop,
                          t == threads - 1 || last > stop ? stop : last, dtype,
                          (u8 *)(uintptr_t)out, 0, 0};
        runs_apart[t] = t && !pthread_create(&started[t], NULL, add_part, &parts[t]);
    }
    for (u64 t = 0; t < threads; t++)
        if (!runs_apart[t]) add_part(&parts[t]);
    for (u64 t = 0; t < threads; t++)
        if (runs_apart[t]) pthread_join(started[t], NULL);
    Py_END_ALLOW_THREADS
    for (u64 t = 0; t < threads; t++)
        if (parts[t].error) return Py_BuildValue("iK", parts[t].error, parts[t].lost);
    return Py_BuildValue("iK", 0, 0ull);
}

/* let_read(pid): where Yama restricts it, descendants of this process may read this one's memory */
static PyObject *py_let_read(PyObject *self, PyObject *argument) {
    unsigned long pid = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return NULL;
    prctl(PR_SET_PTRACER, pid, 0, 0, 0);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"add", py_add, METH_VARARGS, NULL}, {"let_read", py_let_read, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_peer_sum", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__peer_sum(void) { return PyModule_Create(&module); }
