/* Sums of numbers in the memory of several processes of one host: of ranges that stay private, and
   weighted ones of shared memory.

   Gradients stay where backward has put them; who owns a slice reads it from each process
   (process_vm_readv), block by block into its cache, and adds it up in the order of ranks. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "../comm/transport/arithmetic.h"

#define BLOCK (128 << 10) /* bytes of a rank that are read at a time, */
#define SCRATCH (512 << 10) /* and of all ranks: they stay in the second cache of a core */
#define LEAST_BLOCK (16 << 10)
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

/* The gradients of others go into `scratch` one behind the other, then all are added up in one pass. */
static void add_block(Part *part, u8 *scratch, u64 run, u64 start, u64 stop) {
    u64 each = ELEMENT_BYTES[part->dtype], n = stop - start;
    u64 offset = (start - part->runs[2 * run]) * each;
    const u8 *in[MAX_INPUTS];
    for (u64 rank = 0; rank < part->ranks; rank++) {
        u64 address = part->addresses[rank * part->count + run] + offset;
        in[rank] = rank == part->me ? (const u8 *)(uintptr_t)address : scratch;
        if (rank == part->me) continue;
        part->error = read_from(part->pids[rank], scratch, address, n * each);
        if (part->error) {
            part->lost = rank + 1;
            return;
        }
        scratch += (n * each + LINE - 1) / LINE * LINE;
    }
    combine_all(part->dtype, SUM, part->out + (start - part->from) * each, NULL, in, (int)part->ranks, n);
}

static void *add_part(void *argument) {
    Part *part = argument;
    u64 block = SCRATCH / part->ranks / LINE * LINE, most = BLOCK, least = LEAST_BLOCK;
    block = block > most ? most : block < least ? least : block;
    u64 step = block / ELEMENT_BYTES[part->dtype];
    u8 *scratch = aligned_alloc(LINE, block * part->ranks);
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

/* ---------------------------------------------------------------- who has come how far */

static inline void relax(void) {
#if defined(__aarch64__)
    __asm__ __volatile__("yield");
#elif defined(__x86_64__)
    __asm__ __volatile__("pause");
#endif
}

static _Atomic u64 *word(PyObject *address) { return (_Atomic u64 *)(uintptr_t)PyLong_AsUnsignedLongLong(address); }

/* put(address, number): others see what was written before, once they see it */
static PyObject *py_put(PyObject *self, PyObject *args) {
    unsigned long long address, number;
    if (!PyArg_ParseTuple(args, "KK", &address, &number)) return NULL;
    atomic_store((_Atomic u64 *)(uintptr_t)address, number);
    Py_RETURN_NONE;
}

/* next(address) -> the number there, which is one more for who comes next */
static PyObject *py_next(PyObject *self, PyObject *address) {
    _Atomic u64 *at = word(address);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(atomic_fetch_add(at, 1));
}

/* reached(address, ranks, number, ns) -> whether all have put that number, each in a line of its own, in this time */
static PyObject *py_reached(PyObject *self, PyObject *args) {
    unsigned long long address, ranks, number, ns;
    if (!PyArg_ParseTuple(args, "KKKK", &address, &ranks, &number, &ns)) return NULL;
    u64 rank = 0;
    Py_BEGIN_ALLOW_THREADS
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    for (u64 end = (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec + ns; rank < ranks;) {
        if (atomic_load((_Atomic u64 *)(uintptr_t)(address + rank * LINE)) >= number) {
            rank++;
            continue;
        }
        clock_gettime(CLOCK_MONOTONIC, &t);
        if ((u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec >= end) break;
        sched_yield();
        for (int i = 0; i < 50; i++) relax(); /* the other thread of this core may compute */
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(rank == ranks);
}

/* ---------------------------------------------------------------- weighted sums */

typedef struct {
    const u8 *in[MAX_INPUTS];
    double weights[MAX_INPUTS];
    u64 count;
    int dtype, passes_caches;
    u8 *out;
} Terms;

typedef struct {
    const Terms *terms;
    u64 first, last;
} Share;

#if defined(__x86_64__)
#define FUSED __attribute__((target("avx2,fma")))
#define HAS_FUSED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#elif defined(__aarch64__)
#define FUSED
#define HAS_FUSED 1
#else
#define FUSED
#define HAS_FUSED 0
#endif

/* A long result does not stay in a cache: written past it, its old numbers are not read before. */
#define LONG_BYTES (4 << 20)
#if defined(__x86_64__)
#define PUT(out, s)                                                                      \
    if (!terms->passes_caches) memcpy(out, s, sizeof s);                                 \
    else for (u64 k = 0; k < sizeof s / 32; k++) _mm256_stream_si256((__m256i *)(out) + k, ((const __m256i_u *)s)[k])
#define ORDER_PUTS _mm_sfence()
#else
#define PUT(out, s) memcpy(out, s, sizeof s)
#define ORDER_PUTS
#endif

/* in[0] * weights[0], then the others are added, each by one rounding as torch's add(alpha=…) does */
#define MIX(T, FMA)                                                                      \
    FUSED static void mix_##T(const Terms *terms, u64 i, u64 last) {                     \
        enum { STEP = 128 / sizeof(T) };                                                 \
        const T *const *in = (const T *const *)terms->in;                                \
        T *out = (T *)terms->out;                                                        \
        for (; i + STEP <= last; i += STEP) {                                            \
            T s[STEP], by = (T)terms->weights[0];                                        \
            for (int k = 0; k < STEP; k++) s[k] = in[0][i + k] * by;                     \
            for (u64 j = 1; j < terms->count; j++) {                                     \
                by = (T)terms->weights[j];                                               \
                for (int k = 0; k < STEP; k++) s[k] = FMA(in[j][i + k], by, s[k]);       \
            }                                                                            \
            PUT(out + i, s);                                                             \
        }                                                                                \
        for (; i < last; i++) {                                                          \
            T s = in[0][i] * (T)terms->weights[0];                                       \
            for (u64 j = 1; j < terms->count; j++) s = FMA(in[j][i], (T)terms->weights[j], s); \
            out[i] = s;                                                                  \
        }                                                                                \
    }
MIX(float, __builtin_fmaf)
MIX(double, __builtin_fma)

static void *mix_share(void *argument) {
    const Share *share = argument;
    if (share->terms->dtype == F32) mix_float(share->terms, share->first, share->last);
    else mix_double(share->terms, share->first, share->last);
    ORDER_PUTS;
    return NULL;
}

static void mix_all(const Terms *terms, u64 n, u64 threads) {
    Share shares[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    int runs_apart[MOST_THREADS] = {0};
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    u64 each = (n / threads + 31) & ~31ull;
    for (u64 t = 0; t < threads; t++) {
        u64 first = t * each < n ? t * each : n, last = first + each;
        shares[t] = (Share){terms, first, t == threads - 1 || last > n ? n : last};
        runs_apart[t] = t && !pthread_create(&started[t], NULL, mix_share, &shares[t]);
    }
    for (u64 t = 0; t < threads; t++)
        if (!runs_apart[t]) mix_share(&shares[t]);
    for (u64 t = 0; t < threads; t++)
        if (runs_apart[t]) pthread_join(started[t], NULL);
}

/* mix(out, dtype, [(address, weight), …], elements, threads) -> False where one rounding is not to be had */
static PyObject *py_mix(PyObject *self, PyObject *args) {
    unsigned long long out, elements, threads;
    PyObject *list;
    Terms terms;
    if (!PyArg_ParseTuple(args, "KiO!KK", &out, &terms.dtype, &PyList_Type, &list, &elements, &threads)) return NULL;
    terms.out = (u8 *)(uintptr_t)out;
    terms.count = (u64)PyList_GET_SIZE(list);
    if (!HAS_FUSED || !terms.count || terms.count > MAX_INPUTS || !threads) Py_RETURN_FALSE;
    for (u64 j = 0; j < terms.count; j++) {
        unsigned long long address;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, (Py_ssize_t)j), "Kd", &address, &terms.weights[j])) return NULL;
        terms.in[j] = (const u8 *)(uintptr_t)address;
    }
    terms.passes_caches = elements * ELEMENT_BYTES[terms.dtype] >= LONG_BYTES && (uintptr_t)terms.out % 32 == 0;
    Py_BEGIN_ALLOW_THREADS
    mix_all(&terms, elements, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_TRUE;
}

/* let_read(pid): where Yama restricts it, descendants of this process may read this one's memory */
static PyObject *py_let_read(PyObject *self, PyObject *argument) {
    unsigned long pid = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return NULL;
    prctl(PR_SET_PTRACER, pid, 0, 0, 0);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"add", py_add, METH_VARARGS, NULL}, {"mix", py_mix, METH_VARARGS, NULL},
    {"let_read", py_let_read, METH_O, NULL}, {"put", py_put, METH_VARARGS, NULL},
    {"next", py_next, METH_O, NULL}, {"reached", py_reached, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_peer_sum", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__peer_sum(void) { return PyModule_Create(&module); }
