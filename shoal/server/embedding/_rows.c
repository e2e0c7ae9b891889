/* Ids of rows: which server owns them, which one is asked for them, and how often they come.
 *
 * Ids and sizes come from other processes and from users: each is checked before it is used as an index.
 * `tests/server/embedding/rows_driver.c` runs these functions under sanitizers, without Python. */
#ifndef SHOAL_WITHOUT_PYTHON
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;

enum { MAX_SERVERS = 1024, ROUNDS = 4, NO_MEMORY = -2, ALL_FINE = -1 };

/* ------------------------------------------------------------------ how often ids come */

/* counts[id] grows by one for each id. Returns the first position that is out of range, before
 * anything is counted. */
static int64_t count_ids(int64_t *counts, u64 size, const u64 *ids, u64 count) {
    for (u64 i = 0; i < count; i++)
        if (ids[i] >= size) return (int64_t)i;
    for (u64 i = 0; i < count; i++) counts[ids[i]]++;
    return ALL_FINE;
}

/* ------------------------------------------------------------------ owners by hash */

/* The permutation of `hashing.Permutation`: pairs (left, right) of height * width numbers. */
typedef struct {
    u64 size, height, width, keys[ROUNDS];
} Permutation;

static u64 scramble(u64 word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

static u64 shift(u64 half, u64 other, u64 key, u64 size) {
    u64 shifted = half + (((scramble(other ^ key) >> 32) * size) >> 32);
    return shifted >= size ? shifted - size : shifted;
}

static u64 permute(const Permutation *p, u64 number) {
    do {
        u64 left = number / p->width, right = number % p->width;
        left = shift(left, right, p->keys[0], p->height);
        right = shift(right, left, p->keys[1], p->width);
        left = shift(left, right, p->keys[2], p->height);
        right = shift(right, left, p->keys[3], p->width);
        number = left * p->width + right;
    } while (number >= p->size);
    return number;
}

/* Owner and slot of each id. Returns the first position that is out of range, before anything is written. */
static int64_t locate(const Permutation *p, const u64 *ids, u64 count, u64 shards, u64 *owners, u64 *slots) {
    for (u64 i = 0; i < count; i++)
        if (ids[i] >= p->size) return (int64_t)i;
    for (u64 i = 0; i < count; i++) {
        u64 number = permute(p, ids[i]);
        owners[i] = number % shards;
        slots[i] = number / shards;
    }
    return ALL_FINE;
}

/* ------------------------------------------------------------------ which server is asked */

/* As `row_routing.fill`: portions of `amount` that make loads as even as they can be. */
static void fill(const u64 *loads, u64 servers, u64 amount, u64 *portions) {
    u64 order[MAX_SERVERS], count, total = 0;
    for (u64 i = 0; i < servers; i++) {
        u64 j = i;
        for (; j > 0 && loads[order[j - 1]] > loads[i]; j--) order[j] = order[j - 1];
        order[j] = i;
        total += loads[i];
        portions[i] = 0;
    }
    for (count = servers; count > 1 && total + amount < count * loads[order[count - 1]]; count--)
        total -= loads[order[count - 1]];
    total += amount;
    for (u64 i = 0; i < count; i++) portions[order[i]] = total / count - loads[order[i]] + (i < total % count);
}

/* One pull. Either `width` says which rows a server owns, or `owners` has the owner of each id. `hot` has 0 or
 * more for hot rows of the table, or `is_hot` says it for each id; NULL: none is. */
typedef struct {
    const u64 *ids, *places, *owners;
    const int32_t *hot;
    const u8 *is_hot;
    u64 count, num_rows, width, servers, turn;
} Pull;

static int is_hot_row(const Pull *pull, u64 i) {
    return pull->hot ? pull->hot[pull->ids[i]] >= 0 : pull->is_hot && pull->is_hot[i];
}

/* Owners of ids with their lowest bit set for hot rows, and the rows that only the owners have. */
static int64_t find_owners(const Pull *pull, u32 *found, u64 *loads, u64 *hot_rows) {
    for (u64 i = 0; i < pull->count; i++) {
        if (pull->ids[i] >= pull->num_rows) return (int64_t)i;
        u64 owner = pull->owners ? pull->owners[i] : pull->ids[i] / pull->width;
        if (owner >= pull->servers) return (int64_t)i;
        int hot = is_hot_row(pull, i);
        found[i] = (u32)(2 * owner) | (u32)hot;
        loads[owner] += !hot;
        *hot_rows += (u64)hot;
    }
    return ALL_FINE;
}

/* Ids and places in the order of requests: by server, copies before rows that it owns. counts[2 * server] is the
 * number of copies, the next one that of owned rows. Returns the first position that is out of range. */
static int64_t route(const Pull *pull, u64 *ids, u64 *places, u64 *counts) {
    u64 loads[MAX_SERVERS] = {0}, portions[MAX_SERVERS] = {0}, starts[2 * MAX_SERVERS], hot_rows = 0, start = 0;
    u32 *keys = malloc((pull->count ? pull->count : 1) * sizeof *keys);
    if (!keys) return NO_MEMORY;
    int64_t wrong = find_owners(pull, keys, loads, &hot_rows);
    if (wrong != ALL_FINE) goto done;
    fill(loads, pull->servers, hot_rows, portions);
    u64 server = 0, left = portions[0];
    if (hot_rows) {
        u64 skipped = (hot_rows - pull->turn % hot_rows) % hot_rows;
        for (; skipped >= left; left = portions[++server]) skipped -= left;
        left -= skipped;
    }
    memset(counts, 0, 2 * pull->servers * sizeof *counts);
    for (u64 i = 0; i < pull->count; i++) {
        u64 owner = keys[i] / 2, target = owner;
        if (keys[i] % 2) {
            while (!left) {
                server = (server + 1) % pull->servers;
                left = portions[server];
            }
            target = server;
            left--;
        }
        keys[i] = (u32)(2 * target + (owner == target));
        counts[keys[i]]++;
    }
    for (u64 key = 0; key < 2 * pull->servers; start += counts[key++]) starts[key] = start;
    for (u64 i = 0; i < pull->count; i++) {
        u64 to = starts[keys[i]]++;
        ids[to] = pull->ids[i];
        places[to] = pull->places ? pull->places[i] : i;
    }
done:
    free(keys);
    return wrong;
}

/* ------------------------------------------------------------------ rows of a pull, on a server */

/* Rows by id: index[id - low] is the position + 1 of a row, and 0 or less if there is none. */
typedef struct {
    const int32_t *index;
    u64 entries, low;
    const u8 *rows;
    u64 num_rows;
} Source;

/* Row places[i] of the target (i, without places) becomes that of ids[i]. The first `copies` ids are of `copied`,
 * the others of `owned`. With `counts`, each id is counted there; with `copy_counts`, each copy there. */
typedef struct {
    const u64 *ids, *places;
    u64 count, copies, row_bytes, target_rows, counted;
    u8 *target;
    int64_t *counts, *copy_counts;
    Source copied, owned;
} Gather;

static const u8 *row_of(const Gather *g, u64 i) {
    const Source *source = i < g->copies ? &g->copied : &g->owned;
    return source->rows + (u64)(source->index[g->ids[i] - source->low] - 1) * g->row_bytes;
}

/* Returns the first position that has no row, no place or no counter, before anything is copied or counted. */
static int64_t gather(const Gather *g) {
    for (u64 i = 0; i < g->count; i++) {
        const Source *source = i < g->copies ? &g->copied : &g->owned;
        u64 slot = g->ids[i] - source->low;
        if (slot >= source->entries || source->index[slot] <= 0 || (u64)source->index[slot] > source->num_rows)
            return (int64_t)i;
        if ((g->places ? g->places[i] : i) >= g->target_rows) return (int64_t)i;
        if ((g->counts || g->copy_counts) && g->ids[i] >= g->counted) return (int64_t)i;
    }
    for (u64 i = 0; i < g->count; i++) {
        if (i + 4 < g->count) {
            const u8 *next = row_of(g, i + 4);
            for (u64 line = 0; line < g->row_bytes && line < 512; line += 64) __builtin_prefetch(next + line);
        }
        memcpy(g->target + (g->places ? g->places[i] : i) * g->row_bytes, row_of(g, i), g->row_bytes);
    }
    for (u64 i = 0; g->counts && i < g->count; i++) g->counts[g->ids[i]]++;
    for (u64 i = 0; g->copy_counts && i < g->copies; i++) g->copy_counts[g->ids[i]]++;
    return ALL_FINE;
}

/* ------------------------------------------------------------------ Python */

#ifndef SHOAL_WITHOUT_PYTHON
#define ARGS PyObject *self, PyObject *const *args, Py_ssize_t count
#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
enum { MAX_BUFFERS = 12 };

/* The buffers of one call; released together. */
typedef struct {
    Py_buffer views[MAX_BUFFERS];
    int taken;
} Buffers;

static int has_arguments(Py_ssize_t count, Py_ssize_t needed) {
    if (count == needed) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", needed, count);
    return 0;
}

/* The memory of a buffer of `items` numbers; any number of them with items == NULL or *items == -1, which is then
 * set. NULL for None, or with an error. */
static void *take(Buffers *buffers, PyObject *object, int flags, size_t item_bytes, int64_t *items) {
    if (object == Py_None || PyErr_Occurred()) return NULL;
    Py_buffer *view = &buffers->views[buffers->taken];
    if (PyObject_GetBuffer(object, view, flags) != 0) return NULL;
    buffers->taken++;
    int64_t found = view->len / (Py_ssize_t)item_bytes;
    if (view->len % (Py_ssize_t)item_bytes || (*items >= 0 && found != *items)) {
        PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes has the wrong size", view->len);
        return NULL;
    }
    *items = found;
    return view->buf;
}

static PyObject *finish(Buffers *buffers, int64_t wrong) {
    while (buffers->taken) PyBuffer_Release(&buffers->views[--buffers->taken]);
    if (PyErr_Occurred()) return NULL;
    return wrong == NO_MEMORY ? PyErr_NoMemory() : PyLong_FromLongLong(wrong);
}

static u64 number(PyObject *object) { return PyLong_AsUnsignedLongLong(object); }

/* counts int64, ids int64 */
static PyObject *py_count_ids(ARGS) {
    (void)self;
    if (!has_arguments(count, 2)) return NULL;
    Buffers buffers = {.taken = 0};
    int64_t size = -1, ids = -1, wrong = ALL_FINE;
    int64_t *counts = take(&buffers, args[0], PyBUF_WRITABLE, 8, &size);
    const u64 *wanted = take(&buffers, args[1], PyBUF_SIMPLE, 8, &ids);
    if (!PyErr_Occurred() && counts && wanted) wrong = count_ids(counts, (u64)size, wanted, (u64)ids);
    return finish(&buffers, wrong);
}

/* size, height, width, keys uint64, ids int64, shards, owners int64, slots int64 */
static PyObject *py_locate(ARGS) {
    (void)self;
    if (!has_arguments(count, 8)) return NULL;
    Buffers buffers = {.taken = 0};
    int64_t rounds = ROUNDS, ids = -1, wrong = ALL_FINE;
    Permutation p = {number(args[0]), number(args[1]), number(args[2]), {0}};
    u64 shards = number(args[5]);
    const u64 *keys = take(&buffers, args[3], PyBUF_SIMPLE, 8, &rounds);
    const u64 *wanted = take(&buffers, args[4], PyBUF_SIMPLE, 8, &ids);
    u64 *owners = take(&buffers, args[6], PyBUF_WRITABLE, 8, &ids);
    u64 *slots = take(&buffers, args[7], PyBUF_WRITABLE, 8, &ids);
    if (PyErr_Occurred()) return finish(&buffers, wrong);
    u64 most = (u64)1 << 32;
    if (!keys || !wanted || !owners || !slots || !shards || !p.height || !p.width || p.height >= most ||
        p.width >= most || p.height * p.width < p.size) {
        PyErr_SetString(PyExc_ValueError, "a permutation of pairs, at least one shard and all buffers are needed");
        return finish(&buffers, wrong);
    }
    memcpy(p.keys, keys, sizeof p.keys);
    Py_BEGIN_ALLOW_THREADS
    wrong = locate(&p, wanted, (u64)ids, shards, owners, slots);
    Py_END_ALLOW_THREADS
    return finish(&buffers, wrong);
}

/* ids int64, places int64 or None, num_rows, width, owners int64 or None, hot int32 or None, is_hot bool or None,
 * turn, ids and places in order int64, counts int64 of two for each server */
static PyObject *py_route(ARGS) {
    (void)self;
    if (!has_arguments(count, 11)) return NULL;
    Buffers buffers = {.taken = 0};
    int64_t ids = -1, keys = -1, wrong = ALL_FINE;
    Pull pull = {.num_rows = number(args[2]), .width = number(args[3]), .turn = number(args[7])};
    int64_t rows = (int64_t)pull.num_rows;
    pull.ids = take(&buffers, args[0], PyBUF_SIMPLE, 8, &ids);
    pull.places = take(&buffers, args[1], PyBUF_SIMPLE, 8, &ids);
    pull.owners = take(&buffers, args[4], PyBUF_SIMPLE, 8, &ids);
    pull.hot = take(&buffers, args[5], PyBUF_SIMPLE, 4, &rows);
    pull.is_hot = take(&buffers, args[6], PyBUF_SIMPLE, 1, &ids);
    u64 *ordered = take(&buffers, args[8], PyBUF_WRITABLE, 8, &ids);
    u64 *places = take(&buffers, args[9], PyBUF_WRITABLE, 8, &ids);
    u64 *counts = take(&buffers, args[10], PyBUF_WRITABLE, 8, &keys);
    if (PyErr_Occurred()) return finish(&buffers, wrong);
    if (!pull.ids || !ordered || !places || !counts || (!pull.owners && !pull.width) || keys < 2 || keys % 2 ||
        keys > 2 * MAX_SERVERS) {
        PyErr_Format(PyExc_ValueError, "1 to %d servers, their rows and all buffers are needed", MAX_SERVERS);
        return finish(&buffers, wrong);
    }
    pull.count = (u64)ids;
    pull.servers = (u64)keys / 2;
    Py_BEGIN_ALLOW_THREADS
    wrong = route(&pull, ordered, places, counts);
    Py_END_ALLOW_THREADS
    return finish(&buffers, wrong);
}

/* An index and its rows, (index int32, low, rows), or None. */
static Source take_source(Buffers *buffers, PyObject *object, u64 row_bytes) {
    Source source = {0};
    int64_t entries = -1, rows = -1;
    if (object == Py_None || PyErr_Occurred()) return source;
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 3) {
        PyErr_SetString(PyExc_TypeError, "an index, its lowest id and rows are needed");
        return source;
    }
    source.low = number(PyTuple_GET_ITEM(object, 1));
    source.index = take(buffers, PyTuple_GET_ITEM(object, 0), PyBUF_SIMPLE, 4, &entries);
    source.rows = take(buffers, PyTuple_GET_ITEM(object, 2), PyBUF_SIMPLE, row_bytes, &rows);
    if (!source.index || !source.rows) return (Source){0};
    source.entries = (u64)entries;
    source.num_rows = (u64)rows;
    return source;
}

/* ids int64, places int64 or None, copies, row_bytes, target, copied or None, owned, counts and copy_counts int64 or
 * None */
static PyObject *py_gather(ARGS) {
    (void)self;
    if (!has_arguments(count, 9)) return NULL;
    Buffers buffers = {.taken = 0};
    Gather g = {.copies = number(args[2]), .row_bytes = number(args[3])};
    int64_t ids = -1, rows = -1, counted = -1, wrong = ALL_FINE;
    if (!PyErr_Occurred() && (!g.row_bytes || g.row_bytes > PY_SSIZE_T_MAX))
        PyErr_SetString(PyExc_ValueError, "a row has at least one byte");
    g.ids = take(&buffers, args[0], PyBUF_SIMPLE, 8, &ids);
    g.places = take(&buffers, args[1], PyBUF_SIMPLE, 8, &ids);
    g.target = take(&buffers, args[4], PyBUF_WRITABLE, g.row_bytes, &rows);
    g.copied = take_source(&buffers, args[5], g.row_bytes);
    g.owned = take_source(&buffers, args[6], g.row_bytes);
    g.counts = take(&buffers, args[7], PyBUF_WRITABLE, 8, &counted);
    g.copy_counts = take(&buffers, args[8], PyBUF_WRITABLE, 8, &counted);
    if (!PyErr_Occurred() && (!g.ids || !g.target || g.copies > (u64)ids))
        PyErr_SetString(PyExc_ValueError, "ids, at least as many as copies, and a target are needed");
    if (PyErr_Occurred()) return finish(&buffers, wrong);
    g.count = (u64)ids;
    g.target_rows = (u64)rows;
    g.counted = counted < 0 ? 0 : (u64)counted;
    Py_BEGIN_ALLOW_THREADS
    wrong = gather(&g);
    Py_END_ALLOW_THREADS
    return finish(&buffers, wrong);
}

static PyMethodDef methods[] = {METHOD(count_ids), METHOD(gather), METHOD(locate), METHOD(route), {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_rows", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rows(void) { return PyModule_Create(&module); }
#endif
