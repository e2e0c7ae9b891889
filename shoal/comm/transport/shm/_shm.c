/* Collectives and messages through memory that the ranks of one host share.
 *
 *   segment:  header | a block of each rank | slots of each rank | a ring for each (source, target)
 *
 * A collective goes in passes. In pass k every rank writes what others need into its slot k % SLOTS
 * and then raises its flag to k; a rank that needs it waits for that flag. So "flag of r >= k" says:
 * what r has for pass k is there, and r has read everything of the passes before; but in a long
 * reduction, which is pipelined, only of the passes before k - 2. See `free_from`.
 *
 * Nothing waits without end: a wait looks at the processes of its peers ten times a second, at
 * the group's failure, and at a deadline. No torch and, with SHOAL_WITHOUT_PYTHON, no Python here.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../arithmetic.h"

#define MAGIC 0x326c616f6873ull
#define SLOTS 4
#define RECORDS 64
#define MAX_RANKS MAX_INPUTS
#define SLICE_NS 100000000ull
#define CROWDED_LOOKS 20
#define SHARE_BYTES (16 << 10) /* of a rank, in a chunk of a long reduction */
#define LEAST_CHUNK (64 << 10)
#define HEAD_BYTES 32 /* of a message in a ring */
#define PROGRESS_ROUNDS 64

enum { BARRIER, BROADCAST, REDUCE, ALL_REDUCE, GATHER, SCATTER, ALL_GATHER, REDUCE_SCATTER,
       ALL_TO_ALL, SCAN, EXCLUSIVE_SCAN, ALL_TO_ALL_V };
enum { FINE, LOST, DESYNC, LATE, INTERRUPTED, WRONG_SIZE, CLOSED };

/* ---------------------------------------------------------------- what the ranks share */

typedef struct {
    _Atomic u64 seq;
    u32 kind, dtype, op, root;
    u64 count, start_ns, end_ns;
    u8 pad[LINE - 48];
} Record;

typedef struct {
    _Atomic u32 flag, sleepers; /* the pass that this rank has published; who sleeps on it */
    u8 pad1[LINE - 8];
    _Atomic u32 bell, listeners; /* messages: rung when a ring of this rank has changed */
    u8 pad2[LINE - 8];
    _Atomic u32 pid, left;
    u8 pad3[LINE - 8];
    Record records[RECORDS]; /* its last operations */
} Block;

typedef struct {
    u64 magic, generation, bytes, slot_bytes, ring_bytes;
    u32 size, pad0;
    u8 pad1[LINE - 48];
    _Atomic u32 round, round_sleepers; /* rung by the rank that completes a pass */
    u8 pad2[LINE - 8];
    _Atomic u32 failed; /* 0, BUSY while it is written, or the first failure */
    u32 failed_rank, failed_peer, pad3;
    u64 failed_seq;
    u8 pad4[LINE - 24];
} Header;

#define BUSY 99u

typedef struct {
    _Atomic u64 head; /* bytes that the source has put in */
    u8 pad1[LINE - 8];
    _Atomic u64 tail; /* bytes that the target has taken out */
    u8 pad2[LINE - 8];
    u8 data[];
} Ring;

/* ---------------------------------------------------------------- what one rank keeps */

typedef struct {
    int kind, dtype, op, root;
    const u8 *in;
    u8 *out;
    u64 count;         /* elements of a vector, or of one piece */
    /* ALL_TO_ALL_V: bytes of [in offset, in, out offset, out] for each rank; otherwise, where it is
     * given, the addresses of the pieces in or out (ALL_TO_ALL: all in, then all out) */
    const int64_t *table;
    u64 bytes, unit, passes, seq;
} Call;

typedef struct Message Message;

typedef struct Op {
    struct Op *next;
    int peer, is_send, state, source, has_head; /* state: -1 under way, or an outcome */
    u64 tag, bytes, moved;
    u8 *data;
    Message *taken;
} Op;

struct Message {
    Message *next;
    int source, dropped;
    u64 tag, bytes, moved;
    u8 *data; /* its own memory, when no receive was posted yet or its size is wrong */
    Op *into;
};

typedef struct {
    Header *head;
    u8 *base;
    u64 bytes, slot_bytes, ring_bytes;
    int rank, size, crowded, spins;
    int pidfds[MAX_RANKS];
    u32 pass, last_pipelined;
    u64 seq, direct_bytes;
    _Atomic int broken, lost; /* the outcome that ended the group here, and the peer */
    Call open;              /* a call that was started and is to be finished */
    _Atomic u64 wait_since; /* since when a collective sleeps, for whom (-1: all), for which pass */
    _Atomic int wait_peer;
    _Atomic u32 wait_pass;
    pthread_mutex_t lock;   /* of everything about messages below */
    Op *sends[MAX_RANKS], *recvs;
    Message *waiting, *coming[MAX_RANKS];
    _Atomic u32 work, waiters, stopping; /* `work` wakes the thread that serves */
    _Atomic u32 pending;
} Group;

static int (*check_signals)(void) = NULL;

static u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

static inline void relax(void) {
#if defined(__aarch64__)
    __asm__ __volatile__("yield");
#elif defined(__x86_64__)
    __asm__ __volatile__("pause");
#endif
}

static int futex_wait(_Atomic u32 *word, u32 value, u64 ns) {
    struct timespec t = {(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
    return (int)syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

static void futex_wake(_Atomic u32 *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static u64 round_up(u64 n, u64 to) { return (n + to - 1) / to * to; }

static u64 blocks_at(void) { return round_up(sizeof(Header), 4096); }
static u64 slots_at(int size) { return round_up(blocks_at() + (u64)size * sizeof(Block), 4096); }
static u64 rings_at(int size, u64 slot_bytes) {
    return slots_at(size) + (u64)size * SLOTS * slot_bytes;
}
static u64 segment_bytes(int size, u64 slot_bytes, u64 ring_bytes) {
    u64 rings = (u64)size * (u64)size * (sizeof(Ring) + ring_bytes);
    return round_up(rings_at(size, slot_bytes) + rings, 4096);
}

static Block *block(const Group *g, int rank) {
    return (Block *)(g->base + blocks_at() + (u64)rank * sizeof(Block));
}
static u8 *slot(const Group *g, int rank, u32 pass) {
    return g->base + slots_at(g->size) + ((u64)rank * SLOTS + pass % SLOTS) * g->slot_bytes;
}
static Ring *ring(const Group *g, int source, int target) {
    u64 index = (u64)source * (u64)g->size + (u64)target;
    return (Ring *)(g->base + rings_at(g->size, g->slot_bytes)
                    + index * (sizeof(Ring) + g->ring_bytes));
}
static Record *record(const Group *g, int rank, u64 seq) {
    return &block(g, rank)->records[seq % RECORDS];
}

/* ---------------------------------------------------------------- waiting */

static int reached(u32 flag, u32 want) { return (int32_t)(flag - want) >= 0; }

static u32 flag_of(const Group *g, int rank) {
    return atomic_load_explicit(&block(g, rank)->flag, memory_order_acquire);
}

static int has_left(const Group *g, int rank) {
    if (rank == g->rank) return 0;
    if (atomic_load(&block(g, rank)->left)) return 1;
    if (g->pidfds[rank] >= 0) {
        struct pollfd look = {g->pidfds[rank], POLLIN, 0};
        return poll(&look, 1, 0) == 1;
    }
    return kill((pid_t)atomic_load(&block(g, rank)->pid), 0) != 0 && errno == ESRCH;
}

static void wake_all(Group *g) {
    atomic_fetch_add(&g->head->round, 1);
    futex_wake(&g->head->round);
    for (int rank = 0; rank < g->size; rank++) {
        futex_wake(&block(g, rank)->flag);
        atomic_fetch_add(&block(g, rank)->bell, 1);
        futex_wake(&block(g, rank)->bell);
    }
}

/* The first failure of a group is recorded for all its ranks. */
static int fail(Group *g, int outcome, int peer) {
    u32 nothing = 0;
    g->lost = peer;
    g->broken = outcome;
    if (atomic_compare_exchange_strong(&g->head->failed, &nothing, BUSY)) {
        g->head->failed_rank = (u32)g->rank;
        g->head->failed_peer = (u32)peer;
        g->head->failed_seq = g->seq;
        atomic_store(&g->head->failed, (u32)outcome);
        wake_all(g);
    }
    return outcome;
}

static int recorded_failure(Group *g) {
    if (g->broken) return g->broken;
    u32 outcome = atomic_load(&g->head->failed);
    if (outcome == 0 || outcome == BUSY) return FINE;
    int peer = (int)g->head->failed_peer;
    g->lost = peer == g->rank ? (int)g->head->failed_rank : peer;
    g->broken = (int)outcome;
    return (int)outcome;
}

/* Called ten times a second while rank `peer` (or any rank, -1) is behind `want`. */
static int look_around(Group *g, int peer, u32 want, u64 deadline_ns) {
    for (int rank = 0; rank < g->size; rank++) {
        if ((peer < 0 || rank == peer) && has_left(g, rank) && !reached(flag_of(g, rank), want)) {
            if (recorded_failure(g)) return g->broken;
            return fail(g, LOST, rank);
        }
    }
    if (check_signals && check_signals()) return fail(g, INTERRUPTED, g->rank);
    if (now_ns() < deadline_ns) return FINE;
    for (int rank = 0; peer < 0 && rank < g->size; rank++)
        if (!reached(flag_of(g, rank), want)) peer = rank;
    return fail(g, LATE, peer);
}

/* Between two looks: burn some cycles, or where ranks share cores let another one have this core. */
static void pause_briefly(const Group *g) {
    if (g->crowded) sched_yield();
    else relax();
}

/* Whether it is time to look around again: also where other traffic keeps waking this rank up. */
static int is_due(u64 *look_ns) {
    u64 now = now_ns();
    if (now < *look_ns) return 0;
    *look_ns = now + SLICE_NS;
    return 1;
}

/* A collective goes to sleep: for the watcher that reports what this rank waits for. */
static u64 note_wait(Group *g, int peer, u32 want) {
    u64 now = now_ns();
    g->wait_peer = peer;
    g->wait_pass = want;
    g->wait_since = now;
    return now + SLICE_NS;
}

static int wait_peer(Group *g, int peer, u32 want, u64 deadline_ns) {
    Block *b = block(g, peer);
    for (int i = 0; i < g->spins; i++) {
        if (reached(flag_of(g, peer), want)) return FINE;
        pause_briefly(g);
    }
    int outcome = FINE;
    u64 look_ns = note_wait(g, peer, want);
    atomic_fetch_add(&b->sleepers, 1);
    for (;;) {
        u32 seen = atomic_load(&b->flag);
        if (reached(seen, want)) break;
        if ((outcome = recorded_failure(g))) break;
        futex_wait(&b->flag, seen, SLICE_NS);
        if (is_due(&look_ns) && (outcome = look_around(g, peer, want, deadline_ns))) break;
    }
    atomic_fetch_sub(&b->sleepers, 1);
    g->wait_since = 0;
    return outcome;
}

static int all_reached(const Group *g, u32 want) {
    for (int rank = 0; rank < g->size; rank++)
        if (!reached(flag_of(g, rank), want)) return 0;
    return 1;
}

static int wait_all(Group *g, u32 want, u64 deadline_ns) {
    for (int i = 0; i <= g->spins; i++) {
        if (all_reached(g, want)) return FINE;
        pause_briefly(g);
    }
    int outcome = FINE;
    u64 look_ns = note_wait(g, -1, want);
    atomic_fetch_add(&g->head->round_sleepers, 1);
    for (;;) {
        u32 seen = atomic_load(&g->head->round);
        atomic_thread_fence(memory_order_seq_cst);
        if (all_reached(g, want)) break;
        if ((outcome = recorded_failure(g))) break;
        futex_wait(&g->head->round, seen, SLICE_NS);
        if (is_due(&look_ns) && (outcome = look_around(g, -1, want, deadline_ns))) break;
    }
    atomic_fetch_sub(&g->head->round_sleepers, 1);
    g->wait_since = 0;
    return outcome;
}

/* Raise the own flag: what this rank has for pass `pass` is in its slot. */
static void publish(Group *g, u32 pass) {
    Block *b = block(g, g->rank);
    g->pass = pass;
    atomic_store(&b->flag, pass);
    if (atomic_load(&b->sleepers)) futex_wake(&b->flag);
    if (atomic_load(&g->head->round_sleepers)) {
        atomic_thread_fence(memory_order_seq_cst);
        if (all_reached(g, pass)) {
            atomic_fetch_add(&g->head->round, 1);
            futex_wake(&g->head->round);
        }
    }
}

/* ---------------------------------------------------------------- collectives */

static int same_call(const Record *a, const Record *b) {
    return atomic_load_explicit(&a->seq, memory_order_relaxed)
               == atomic_load_explicit(&b->seq, memory_order_relaxed)
           && a->kind == b->kind && a->dtype == b->dtype && a->op == b->op && a->root == b->root
           && a->count == b->count;
}

static int verify(Group *g, const Call *c, int peer) {
    if (same_call(record(g, peer, c->seq), record(g, g->rank, c->seq))) return FINE;
    return fail(g, DESYNC, peer);
}

static u64 part(const Call *c, u64 pass) {
    u64 from = pass * c->unit;
    if (from >= c->bytes) return 0;
    return c->bytes - from < c->unit ? c->bytes - from : c->unit;
}

static const u8 *piece_in(const Call *c, int rank) {
    return c->table ? (const u8 *)(intptr_t)c->table[rank] : c->in + (u64)rank * c->bytes;
}
static u8 *piece_out(const Group *g, const Call *c, int rank) {
    int first = c->kind == ALL_TO_ALL ? g->size : 0;
    return c->table ? (u8 *)(intptr_t)c->table[first + rank] : c->out + (u64)rank * c->bytes;
}

/* What this rank has for the others in one pass, from its tensor into its slot. */
static void fill(Group *g, const Call *c, u64 pass, u8 *mine) {
    u64 from = pass * c->unit, n = part(c, pass);
    int is_root = g->rank == c->root;
    switch (c->kind) {
        case BARRIER: return;
        case BROADCAST: if (is_root) memcpy(mine, c->in + from, n); return;
        case GATHER: if (!is_root) memcpy(mine, c->in + from, n); return;
        case SCATTER: if (!is_root) return; /* fall through */
        case REDUCE_SCATTER:
        case ALL_TO_ALL:
            for (int to = 0; to < g->size; to++)
                if (to != g->rank)
                    memcpy(mine + (u64)to * c->unit, piece_in(c, to) + from, n);
            return;
        case ALL_TO_ALL_V:
            for (int to = 0; to < g->size; to++) {
                u64 at = (u64)c->table[to * 4], whole = (u64)c->table[to * 4 + 1];
                if (to != g->rank && from < whole)
                    memcpy(mine + (u64)to * c->unit, c->in + at + from,
                           whole - from < c->unit ? whole - from : c->unit);
            }
            return;
        default: memcpy(mine, c->in + from, n);
    }
}

/* What the others have for this rank in one pass, out of their slots into its tensor. */
static void drain(Group *g, const Call *c, u64 pass, u32 number) {
    const u8 *in[MAX_RANKS];
    u64 from = pass * c->unit, n = part(c, pass), elements = n / ELEMENT_BYTES[c->dtype];
    int is_root = g->rank == c->root;
    switch (c->kind) {
        case BROADCAST:
            if (!is_root) memcpy(c->out + from, slot(g, c->root, number), n);
            return;
        case GATHER: if (!is_root) return; /* fall through */
        case ALL_GATHER:
            for (int p = 0; p < g->size; p++) {
                u8 *to = piece_out(g, c, p) + from;
                const u8 *source = p == g->rank ? c->in + from : slot(g, p, number);
                if (to != source) memcpy(to, source, n);
            }
            return;
        case SCATTER:
            in[0] = is_root ? piece_in(c, g->rank) + from
                            : slot(g, c->root, number) + (u64)g->rank * c->unit;
            if (c->out + from != in[0]) memcpy(c->out + from, in[0], n);
            return;
        case ALL_TO_ALL:
            for (int p = 0; p < g->size; p++) {
                u8 *to = piece_out(g, c, p) + from;
                const u8 *source = p == g->rank ? piece_in(c, p) + from
                                                : slot(g, p, number) + (u64)g->rank * c->unit;
                if (to != source) memcpy(to, source, n);
            }
            return;
        case ALL_TO_ALL_V:
            for (int p = 0; p < g->size; p++) {
                u64 whole = (u64)c->table[p * 4 + 3];
                if (from >= whole) continue;
                const u8 *source = p == g->rank ? c->in + c->table[p * 4] + from
                                                : slot(g, p, number) + (u64)g->rank * c->unit;
                memcpy(c->out + c->table[p * 4 + 2] + from, source,
                       whole - from < c->unit ? whole - from : c->unit);
            }
            return;
        case REDUCE_SCATTER:
            for (int p = 0; p < g->size; p++)
                in[p] = p == g->rank ? piece_in(c, p) + from
                                     : slot(g, p, number) + (u64)g->rank * c->unit;
            combine_all(c->dtype, c->op, c->out + from, NULL, in, g->size, elements);
            return;
        case REDUCE: if (!is_root) return; /* fall through */
        case ALL_REDUCE: case SCAN: case EXCLUSIVE_SCAN: {
            int count = c->kind == SCAN ? g->rank + 1 : c->kind == EXCLUSIVE_SCAN ? g->rank : g->size;
            for (int p = 0; p < count; p++) in[p] = slot(g, p, number);
            if (count) combine_all(c->dtype, c->op, c->out + from, NULL, in, count, elements);
        }
    }
}

/* Wait for those ranks that this one reads from in pass `number`. */
static int await_sources(Group *g, const Call *c, u32 number, int first, u64 deadline_ns) {
    int from = 0, to = g->size, outcome = FINE;
    switch (c->kind) {
        case BROADCAST: case SCATTER:
            from = c->root, to = g->rank == c->root ? from : from + 1;
            break;
        case GATHER: case REDUCE: if (g->rank != c->root) to = 0; break;
        case SCAN: case EXCLUSIVE_SCAN: to = g->rank;
    }
    if (to - from == g->size) outcome = wait_all(g, number, deadline_ns);
    for (int p = from; p < to && !outcome; p++) {
        if (to - from < g->size) outcome = wait_peer(g, p, number, deadline_ns);
        if (!outcome && first) outcome = verify(g, c, p);
    }
    return outcome;
}

/* Where all flags must be before the slot of pass `number` may be filled again. */
static u32 free_from(const Group *g, u32 number) {
    int pipelined = reached(g->last_pipelined, number - SLOTS);
    return pipelined ? number - (SLOTS - 3) : number - (SLOTS - 1);
}

/* Bounds of what rank `share` of `size` reduces of `bytes`, on cache lines. */
static u64 bound(u64 bytes, int share, int size) {
    u64 at = (bytes / LINE * (u64)share / (u64)size) * LINE;
    return share == size ? bytes : at;
}

/* Long reductions: each rank reduces a slice of each chunk, and reads the results of the other slices.
 *
 *   publish k      inputs of chunk j         in slot k
 *   publish k+1    inputs of chunk j+1       in slot k+1, results of chunk j in slot k
 *
 * So a chunk costs one round of flags, and the tensor is read once and written once.
 */
static void fill_shares(Group *g, const Call *c, u64 chunk, u8 *mine) {
    u64 from = chunk * c->unit, n = part(c, chunk);
    u64 low = bound(n, g->rank, g->size), high = bound(n, g->rank + 1, g->size);
    memcpy(mine, c->in + from, low);
    memcpy(mine + high, c->in + from + high, n - high);
}

static void reduce_share(Group *g, const Call *c, u64 chunk, u32 number) {
    const u8 *in[MAX_RANKS];
    u64 from = chunk * c->unit, n = part(c, chunk);
    u64 low = bound(n, g->rank, g->size), high = bound(n, g->rank + 1, g->size);
    int keeps = c->kind == ALL_REDUCE || g->rank == c->root;
    u8 *mine = slot(g, g->rank, number) + low;
    for (int p = 0; p < g->size; p++)
        in[p] = p == g->rank ? c->in + from + low : slot(g, p, number) + low;
    combine_all(c->dtype, c->op, keeps ? c->out + from + low : mine, keeps ? mine : NULL, in, g->size,
                (high - low) / ELEMENT_BYTES[c->dtype]);
}

static void take_shares(Group *g, const Call *c, u64 chunk, u32 number) {
    u64 from = chunk * c->unit, n = part(c, chunk);
    if (c->kind == REDUCE && g->rank != c->root) return;
    for (int p = 0; p < g->size; p++) {
        u64 low = bound(n, p, g->size), high = bound(n, p + 1, g->size);
        if (p != g->rank) memcpy(c->out + from + low, slot(g, p, number) + low, high - low);
    }
}

static int reduce_in_shares(Group *g, const Call *c, u64 deadline_ns) {
    u32 number = g->pass + 1;
    int outcome = wait_all(g, free_from(g, number), deadline_ns);
    if (outcome) return outcome;
    fill_shares(g, c, 0, slot(g, g->rank, number));
    publish(g, number);
    for (u64 chunk = 0; chunk <= c->passes; chunk++, number++) {
        if ((outcome = wait_all(g, number, deadline_ns))) return outcome;
        for (int p = 0; chunk == 0 && p < g->size; p++)
            if ((outcome = verify(g, c, p))) return outcome;
        if (chunk < c->passes) reduce_share(g, c, chunk, number);
        if (chunk + 1 < c->passes) fill_shares(g, c, chunk + 1, slot(g, g->rank, number + 1));
        if (chunk < c->passes) publish(g, number + 1);
        if (chunk > 0) take_shares(g, c, chunk - 1, number - 1);
    }
    g->last_pipelined = g->pass;
    return FINE;
}

static int in_shares(const Group *g, const Call *c) {
    return (c->kind == ALL_REDUCE || c->kind == REDUCE) && c->bytes > g->direct_bytes;
}

/* Three chunks, of the tensor and of slots, stay in the second cache of a core; larger ones go through memory. */
static u64 chunk_bytes(const Group *g) {
    u64 bytes = SHARE_BYTES * (u64)g->size;
    return bytes < LEAST_CHUNK ? LEAST_CHUNK : bytes;
}

/* How a call is cut into passes, and its record for the others to compare. */
static void open_call(Group *g, Call *c) {
    int many = c->kind == SCATTER || c->kind == REDUCE_SCATTER || c->kind == ALL_TO_ALL
               || c->kind == ALL_TO_ALL_V;
    c->bytes = c->kind == BARRIER ? 0 : c->count * ELEMENT_BYTES[c->dtype];
    c->unit = many ? g->slot_bytes / (u64)g->size / LINE * LINE : g->slot_bytes;
    if (in_shares(g, c) && c->unit > chunk_bytes(g)) c->unit = chunk_bytes(g);
    c->passes = (c->bytes + c->unit - 1) / c->unit;
    if (c->passes == 0) c->passes = 1;
    c->seq = ++g->seq;
    Record *r = record(g, g->rank, c->seq);
    r->kind = (u32)c->kind, r->dtype = (u32)c->dtype, r->op = (u32)c->op, r->root = (u32)c->root;
    r->count = c->count, r->start_ns = now_ns(), r->end_ns = 0;
    atomic_store_explicit(&r->seq, c->seq, memory_order_relaxed);
}

static void close_call(Group *g, const Call *c) { record(g, g->rank, c->seq)->end_ns = now_ns(); }

static int run_call(Group *g, Call *c, u64 timeout_ns) {
    int outcome = recorded_failure(g);
    if (outcome) return outcome;
    u64 deadline_ns = now_ns() + timeout_ns;
    open_call(g, c);
    if (in_shares(g, c)) outcome = reduce_in_shares(g, c, deadline_ns);
    else for (u64 pass = 0; pass < c->passes && !outcome; pass++) {
        u32 number = g->pass + 1;
        if ((outcome = wait_all(g, free_from(g, number), deadline_ns))) break;
        fill(g, c, pass, slot(g, g->rank, number));
        publish(g, number);
        if ((outcome = await_sources(g, c, number, pass == 0, deadline_ns))) break;
        drain(g, c, pass, number);
    }
    if (!outcome) close_call(g, c);
    return outcome;
}

/* A call of one pass in two halves: give without waiting, take later. 0: it cannot be so begun. */
static int start_call(Group *g, Call *c) {
    int many = c->kind == SCATTER || c->kind == REDUCE_SCATTER || c->kind == ALL_TO_ALL;
    u64 bytes = c->kind == BARRIER ? 0 : c->count * ELEMENT_BYTES[c->dtype];
    u32 number = g->pass + 1;
    if (bytes > g->direct_bytes || bytes * (many ? (u64)g->size : 1) > g->slot_bytes / 2) return 0;
    if (c->kind == ALL_TO_ALL_V || recorded_failure(g) || !all_reached(g, free_from(g, number))) return 0;
    open_call(g, c);
    fill(g, c, 0, slot(g, g->rank, number));
    publish(g, number);
    g->open = *c;
    return 1;
}

static int finish_call(Group *g, u64 timeout_ns) {
    const Call *c = &g->open;
    int outcome = g->broken;
    if (!outcome) outcome = await_sources(g, c, g->pass, 1, now_ns() + timeout_ns);
    if (outcome) return outcome;
    drain(g, c, 0, g->pass);
    close_call(g, c);
    return FINE;
}

/* ---------------------------------------------------------------- messages */

typedef struct {
    u64 tag, bytes, pad[2];
} Head;

static void ring_bell(Group *g, int rank) {
    Block *b = block(g, rank);
    atomic_fetch_add(&b->bell, 1);
    if (atomic_load(&b->listeners)) futex_wake(&b->bell);
}

static void put(const Group *g, Ring *r, u64 at, const u8 *data, u64 n) {
    u64 place = at % g->ring_bytes, first = g->ring_bytes - place;
    if (first > n) first = n;
    memcpy(r->data + place, data, first);
    memcpy(r->data, data + first, n - first);
}

static void get(const Group *g, const Ring *r, u64 at, u8 *data, u64 n) {
    u64 place = at % g->ring_bytes, first = g->ring_bytes - place;
    if (first > n) first = n;
    memcpy(data, r->data + place, first);
    memcpy(data + first, r->data, n - first);
}

static void done(Group *g, Op *op, int state) {
    op->state = state;
    atomic_fetch_sub(&g->pending, 1);
    ring_bell(g, g->rank);
}

/* The next piece of what is to be sent to `to`; 1 when something moved. */
static int push(Group *g, int to) {
    Op *op = g->sends[to];
    if (!op) return 0;
    Ring *r = ring(g, g->rank, to);
    u64 head = atomic_load_explicit(&r->head, memory_order_relaxed);
    u64 room = g->ring_bytes - (head - atomic_load_explicit(&r->tail, memory_order_acquire));
    u64 start = head;
    if (!op->has_head && room >= HEAD_BYTES) {
        Head h = {op->tag, op->bytes, {0, 0}};
        put(g, r, head, (const u8 *)&h, HEAD_BYTES);
        op->has_head = 1;
        head += HEAD_BYTES, room -= HEAD_BYTES;
    }
    if (op->has_head) {
        u64 n = op->bytes - op->moved < room ? op->bytes - op->moved : room;
        put(g, r, head, op->data + op->moved, n);
        op->moved += n;
        head += round_up(n, HEAD_BYTES); /* room is always a multiple of it */
    }
    if (head != start) {
        atomic_store_explicit(&r->head, head, memory_order_release);
        ring_bell(g, to);
    }
    if (op->has_head && op->moved == op->bytes) {
        g->sends[to] = op->next;
        done(g, op, FINE);
    }
    return head != start;
}

static int fits(const Op *op, const Message *m) {
    return (op->peer < 0 || op->peer == m->source) && op->tag == m->tag;
}

static void give(Op *op, Message *m) {
    m->into = op;
    op->taken = m;
    op->source = m->source;
}

static Message *announce(Group *g, int from, const Head *h) {
    Message *m = calloc(1, sizeof *m);
    Op **at = &g->recvs;
    if (!m) abort();
    m->source = from, m->tag = h->tag, m->bytes = h->bytes;
    while (*at && !fits(*at, m)) at = &(*at)->next;
    if (*at) {
        Op *op = *at;
        *at = op->next;
        give(op, m);
        if (op->bytes == m->bytes) return m;
    } else {
        Message **last = &g->waiting;
        while (*last) last = &(*last)->next;
        *last = m;
    }
    if (!(m->data = malloc(m->bytes ? m->bytes : 1))) abort();
    return m;
}

/* A message is complete: deliver it, if a receive was posted. */
static void deliver(Group *g, Message *m) {
    Op *op = m->into;
    if (!op && !m->dropped) return;
    if (op) {
        if (op->bytes == m->bytes && m->data) memcpy(op->data, m->data, m->bytes);
        op->moved = m->bytes;
        op->taken = NULL;
        done(g, op, op->bytes == m->bytes ? FINE : WRONG_SIZE);
    }
    free(m->data);
    free(m);
}

static int pull(Group *g, int from) {
    Ring *r = ring(g, from, g->rank);
    u64 tail = atomic_load_explicit(&r->tail, memory_order_relaxed), start = tail;
    u64 there = atomic_load_explicit(&r->head, memory_order_acquire) - tail;
    Message *m = g->coming[from];
    if (!m && there >= HEAD_BYTES) {
        Head h;
        get(g, r, tail, (u8 *)&h, HEAD_BYTES);
        tail += HEAD_BYTES, there -= HEAD_BYTES;
        m = g->coming[from] = announce(g, from, &h);
    }
    if (m) {
        u64 n = m->bytes - m->moved < there ? m->bytes - m->moved : there;
        get(g, r, tail, (m->data ? m->data : m->into->data) + m->moved, n);
        m->moved += n;
        tail += round_up(n, HEAD_BYTES);
        if (m->moved == m->bytes) {
            g->coming[from] = NULL;
            deliver(g, m);
        }
    }
    if (tail == start) return 0;
    atomic_store_explicit(&r->tail, tail, memory_order_release);
    ring_bell(g, from);
    return 1;
}

/* Bounded: a rank that keeps sending must not keep this one from its other duties. */
static void progress(Group *g) {
    int moved = 1;
    for (int i = 0; i < PROGRESS_ROUNDS && moved; i++) {
        moved = 0;
        for (int rank = 0; rank < g->size; rank++) moved |= push(g, rank) | pull(g, rank);
    }
}

static Op *post(Group *g, int is_send, u8 *data, u64 bytes, int peer, u64 tag) {
    Op *op = calloc(1, sizeof *op);
    if (!op) return NULL;
    op->is_send = is_send, op->data = data, op->bytes = bytes, op->peer = peer, op->tag = tag;
    op->state = -1, op->source = peer;
    pthread_mutex_lock(&g->lock);
    atomic_fetch_add(&g->pending, 1);
    Op **at = is_send ? &g->sends[peer] : &g->recvs;
    Message **m = &g->waiting;
    while (!is_send && *m && !fits(op, *m)) m = &(*m)->next;
    if (!is_send && *m) {
        Message *found = *m;
        *m = found->next;
        found->next = NULL;
        give(op, found);
        if (found->moved == found->bytes && g->coming[found->source] != found) deliver(g, found);
    } else {
        while (*at) at = &(*at)->next;
        *at = op;
    }
    progress(g);
    if (op->state < 0 && !atomic_load(&g->waiters)) {
        atomic_fetch_add(&g->work, 1);
        futex_wake(&g->work);
    }
    pthread_mutex_unlock(&g->lock);
    return op;
}

static int state_of(Group *g, Op *op) {
    pthread_mutex_lock(&g->lock);
    if (op->state < 0) progress(g);
    int state = op->state;
    pthread_mutex_unlock(&g->lock);
    return state;
}

/* No thread waits for it any more: its memory must not be written to. */
static void forget(Group *g, Op *op) {
    pthread_mutex_lock(&g->lock);
    if (op->state < 0) {
        for (int rank = 0; rank <= g->size; rank++) {
            Op **at = rank < g->size ? &g->sends[rank] : &g->recvs;
            while (*at && *at != op) at = &(*at)->next;
            if (*at) *at = op->next;
        }
        if (op->taken && !op->taken->data) {
            u8 *kept = malloc(op->bytes ? op->bytes : 1);
            if (!kept) abort();
            memcpy(kept, op->data, op->taken->moved);
            op->taken->data = kept;
        }
        if (op->taken) op->taken->into = NULL, op->taken->dropped = 1;
        atomic_fetch_sub(&g->pending, 1);
        /* a part of it is in the ring: the target would take the next message for the rest */
        if (op->is_send && op->has_head && !recorded_failure(g))
            fail(g, has_left(g, op->peer) ? LOST : LATE, op->peer);
    }
    pthread_mutex_unlock(&g->lock);
    free(op);
}

/* Cancel a receive for which nothing has arrived; 0 if something has. No thread may wait for it. */
static int withdraw(Group *g, Op *op) {
    pthread_mutex_lock(&g->lock);
    if (op->state < 0) progress(g);
    Op **at = &g->recvs;
    while (*at && *at != op) at = &(*at)->next;
    int untouched = *at && op->state < 0 && !op->taken;
    if (untouched) {
        *at = op->next;
        atomic_fetch_sub(&g->pending, 1);
    }
    pthread_mutex_unlock(&g->lock);
    if (untouched) free(op);
    return untouched;
}

static int missing_peer(Group *g, const Op *op) {
    for (int rank = 0; rank < g->size; rank++)
        if ((op->peer == rank || (op->peer < 0 && rank != g->rank)) && has_left(g, rank)) return rank;
    return -1;
}

static int wait_op(Group *g, Op *op, u64 timeout_ns, int *lost) {
    u64 deadline_ns = now_ns() + timeout_ns, look_ns = now_ns() + SLICE_NS;
    Block *own = block(g, g->rank);
    int state = -1, outcome = FINE;
    atomic_fetch_add(&g->waiters, 1);
    for (int i = 0; i < g->spins / 8 && state < 0; i++) state = state_of(g, op);
    atomic_fetch_add(&own->listeners, 1);
    while (state < 0) {
        u32 seen = atomic_load(&own->bell);
        if ((state = state_of(g, op)) >= 0) break;
        if ((outcome = recorded_failure(g))) { *lost = g->lost; break; }
        futex_wait(&own->bell, seen, SLICE_NS);
        if (!is_due(&look_ns)) continue;
        if ((*lost = missing_peer(g, op)) >= 0 && (state = state_of(g, op)) < 0) { outcome = LOST; break; }
        if (check_signals && check_signals()) { outcome = INTERRUPTED; break; }
        if (now_ns() > deadline_ns) { outcome = LATE, *lost = op->peer; break; }
    }
    atomic_fetch_sub(&own->listeners, 1);
    if (atomic_fetch_sub(&g->waiters, 1) == 1 && atomic_load(&g->pending)) {
        atomic_fetch_add(&g->work, 1);
        futex_wake(&g->work);
    }
    return outcome ? outcome : state;
}

/* Moves messages that no thread waits for; returns after stop. */
static void serve(Group *g) {
    Block *own = block(g, g->rank);
    while (!atomic_load(&g->stopping)) {
        u32 work = atomic_load(&g->work);
        if (!atomic_load(&g->pending) || atomic_load(&g->waiters)) {
            if (!atomic_load(&g->stopping)) futex_wait(&g->work, work, SLICE_NS);
            continue;
        }
        atomic_fetch_add(&own->listeners, 1);
        u32 seen = atomic_load(&own->bell);
        pthread_mutex_lock(&g->lock);
        progress(g);
        pthread_mutex_unlock(&g->lock);
        if (atomic_load(&g->pending) && !atomic_load(&g->stopping))
            futex_wait(&own->bell, seen, SLICE_NS);
        atomic_fetch_sub(&own->listeners, 1);
    }
}

static void stop_serving(Group *g) {
    atomic_store(&g->stopping, 1);
    atomic_fetch_add(&g->work, 1);
    futex_wake(&g->work);
    ring_bell(g, g->rank);
}

/* ---------------------------------------------------------------- a group's life */

/* In parts: a signal undoes the call that it interrupts, and is no error. */
static int allocate(int fd, u64 bytes) {
    int failure = 0;
    for (u64 at = 0, part = 1 << 20; at < bytes && !failure; at += part) {
        u64 length = bytes - at < part ? bytes - at : part;
        while ((failure = posix_fallocate(fd, (off_t)at, (off_t)length)) == EINTR) {}
    }
    if (failure) errno = failure;
    return !failure;
}

/* A memfd has no name: nothing can be left behind, whichever process is killed. */
static int create_segment(int size, u64 slot_bytes, u64 ring_bytes, u64 generation) {
    u64 bytes = segment_bytes(size, slot_bytes, ring_bytes);
    int fd = (int)syscall(SYS_memfd_create, "shoal", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -1;
    Header *h = MAP_FAILED;
    if (fchmod(fd, 0600) == 0 && allocate(fd, bytes))
        h = mmap(NULL, sizeof *h, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (h == MAP_FAILED) {
        close(fd);
        return -1;
    }
    h->generation = generation, h->bytes = bytes, h->slot_bytes = slot_bytes;
    h->ring_bytes = ring_bytes, h->size = (u32)size, h->magic = MAGIC;
    munmap(h, sizeof *h);
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    return fd;
}

static int available_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

static int is_segment(const Header *h, u64 bytes, int size, u64 generation) {
    return h->magic == MAGIC && h->generation == generation && h->bytes == bytes
           && h->size == (u32)size && bytes == segment_bytes(size, h->slot_bytes, h->ring_bytes);
}

static Group *attach(int fd, int rank, int size, u64 generation) {
    struct stat about;
    if (fstat(fd, &about) != 0 || (u64)about.st_size < sizeof(Header)) return NULL;
    u64 bytes = (u64)about.st_size;
    u8 *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return NULL;
    Group *g = is_segment((Header *)base, bytes, size, generation) ? calloc(1, sizeof *g) : NULL;
    if (!g) {
        munmap(base, bytes);
        return NULL;
    }
    g->head = (Header *)base, g->base = base, g->bytes = bytes;
    g->slot_bytes = g->head->slot_bytes, g->ring_bytes = g->head->ring_bytes;
    g->rank = rank, g->size = size, g->direct_bytes = 16384;
    g->crowded = size > available_cores();
    g->spins = g->crowded ? CROWDED_LOOKS : 10000;
    for (int p = 0; p < MAX_RANKS; p++) g->pidfds[p] = -1;
    pthread_mutex_init(&g->lock, NULL);
    atomic_store(&block(g, rank)->pid, (u32)getpid());
    return g;
}

/* Once every rank has attached: get hold of their processes. One that has died since is found later. */
static void watch_peers(Group *g) {
    for (int p = 0; p < g->size; p++) {
        pid_t pid = (pid_t)atomic_load(&block(g, p)->pid);
        if (p == g->rank || pid == getpid()) continue;
#ifdef SYS_pidfd_open
        g->pidfds[p] = (int)syscall(SYS_pidfd_open, pid, 0);
#endif
    }
}

/* Waits of this rank end, and the others learn that it does not take part any more. */
static void leave(Group *g) {
    if (!g->broken) g->broken = CLOSED;
    atomic_store(&block(g, g->rank)->left, 1);
    wake_all(g);
}

static void detach(Group *g) {
    for (int p = 0; p < g->size; p++) {
        if (g->pidfds[p] >= 0) close(g->pidfds[p]);
        Message *m = g->coming[p];
        if (m && (m->into || m->dropped)) free(m->data), free(m);
    }
    while (g->waiting) {
        Message *m = g->waiting;
        g->waiting = m->next;
        free(m->data);
        free(m);
    }
    pthread_mutex_destroy(&g->lock);
    munmap(g->base, g->bytes);
    free(g);
}

#ifndef SHOAL_WITHOUT_PYTHON
/* ---------------------------------------------------------------- Python's side */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NAME "shoal.comm.transport.shm._shm.group"
#define ARGS PyObject *self, PyObject *const *args, Py_ssize_t count
#define NEED(n)                                                                 \
    (void)self;                                                                 \
    if (count != (n)) {                                                         \
        PyErr_Format(PyExc_TypeError, "%d arguments are needed, not %zd", n, count); \
        return NULL;                                                            \
    }
#define GROUP(g)                                                                \
    Group *g = PyCapsule_GetPointer(args[0], NAME);                             \
    if (!g) return NULL;

static u64 number(PyObject *object) { return PyLong_AsUnsignedLongLongMask(object); }
static int small(PyObject *object) { return (int)PyLong_AsLong(object); }

static int signals(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(state);
    return raised;
}

static PyObject *answer(int outcome) {
    if (PyErr_Occurred()) return NULL;
    return PyLong_FromLong(outcome);
}

static PyObject *py_create(ARGS) {
    NEED(4)
    int fd = create_segment(small(args[0]), number(args[1]), number(args[2]), number(args[3]));
    if (PyErr_Occurred()) return NULL;
    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

/* The context of a handle is a dict of the tensors whose memory messages use, by operation. */
static PyObject *tensors_of(PyObject *capsule) { return PyCapsule_GetContext(capsule); }

static void abandon(PyObject *capsule) {
    Group *g = PyCapsule_IsValid(capsule, NAME) ? PyCapsule_GetPointer(capsule, NAME) : NULL;
    if (g) {
        leave(g);
        detach(g);
    }
    Py_XDECREF(tensors_of(capsule));
}

static PyObject *py_attach(ARGS) {
    NEED(4)
    int rank = small(args[1]), size = small(args[2]);
    if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) {
        PyErr_Format(PyExc_ValueError, "rank %d of %d: at most %d ranks", rank, size, MAX_RANKS);
        return NULL;
    }
    Group *g = attach(small(args[0]), rank, size, number(args[3]));
    if (!g) {
        PyErr_SetString(PyExc_ValueError, "this is not the shared memory of this group");
        return NULL;
    }
    PyObject *tensors = PyDict_New(), *capsule = tensors ? PyCapsule_New(g, NAME, abandon) : NULL;
    if (capsule && PyCapsule_SetContext(capsule, tensors) == 0) return capsule;
    Py_XDECREF(tensors);
    return NULL;
}

static PyObject *py_watch(ARGS) {
    NEED(1) GROUP(g)
    watch_peers(g);
    return answer(0);
}

/* What holds a peer's process, or -1. */
static PyObject *py_pidfd(ARGS) {
    NEED(2) GROUP(g)
    int rank = small(args[1]);
    return answer(rank >= 0 && rank < g->size ? g->pidfds[rank] : -1);
}

static Call call_from(PyObject *const *args) {
    Call c = {.kind = small(args[1]), .in = (const u8 *)number(args[2]), .out = (u8 *)number(args[3]),
              .count = number(args[4]), .dtype = small(args[5]), .op = small(args[6]),
              .root = small(args[7])};
    return c;
}

static PyObject *py_collective(ARGS) {
    NEED(10) GROUP(g)
    Call c = call_from(args);
    c.table = (const int64_t *)number(args[8]);
    u64 timeout_ns = number(args[9]);
    int outcome;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    outcome = run_call(g, &c, timeout_ns);
    Py_END_ALLOW_THREADS
    return answer(outcome);
}

static PyObject *py_start(ARGS) {
    NEED(9) GROUP(g)
    Call c = call_from(args);
    c.table = (const int64_t *)number(args[8]);
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(start_call(g, &c));
}

static PyObject *py_finish(ARGS) {
    NEED(2) GROUP(g)
    u64 timeout_ns = number(args[1]);
    int outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = finish_call(g, timeout_ns);
    Py_END_ALLOW_THREADS
    return answer(outcome);
}

/* (outcome, peer) as this rank saw it, and (rank, peer, number) as it was recorded first. */
static PyObject *py_failure(ARGS) {
    NEED(1) GROUP(g)
    return Py_BuildValue("iiIIK", g->broken, g->lost, g->head->failed_rank, g->head->failed_peer,
                         (unsigned long long)g->head->failed_seq);
}

/* None, or since when a collective of this rank sleeps, and the ranks that it sleeps for. */
static PyObject *py_waiting(ARGS) {
    NEED(1) GROUP(g)
    u64 since = g->wait_since;
    int peer = g->wait_peer;
    u32 want = g->wait_pass;
    if (!since) Py_RETURN_NONE;
    PyObject *missing = PyList_New(0);
    for (int rank = 0; missing && rank < g->size; rank++) {
        if ((peer >= 0 && rank != peer) || reached(flag_of(g, rank), want)) continue;
        PyObject *item = PyLong_FromLong(rank);
        if (!item || PyList_Append(missing, item) != 0) Py_CLEAR(missing);
        Py_XDECREF(item);
    }
    return missing ? Py_BuildValue("KN", (unsigned long long)since, missing) : NULL;
}

/* The process of a rank. */
static PyObject *py_pid(ARGS) {
    NEED(2) GROUP(g)
    int rank = small(args[1]);
    return answer(rank >= 0 && rank < g->size ? (int)atomic_load(&block(g, rank)->pid) : 0);
}

static PyObject *py_history(ARGS) {
    NEED(2) GROUP(g)
    int rank = small(args[1]);
    PyObject *found = PyList_New(0);
    if (rank < 0 || rank >= g->size || !found) return found;
    u64 last = 0;
    for (int i = 0; i < RECORDS; i++) {
        u64 seq = atomic_load(&block(g, rank)->records[i].seq);
        if (seq > last) last = seq;
    }
    for (u64 seq = last > RECORDS ? last - RECORDS + 1 : 1; seq <= last; seq++) {
        const Record *r = record(g, rank, seq);
        PyObject *item = Py_BuildValue("KIIIIKKK", (unsigned long long)seq, r->kind, r->dtype, r->op,
                                       r->root, (unsigned long long)r->count,
                                       (unsigned long long)r->start_ns, (unsigned long long)r->end_ns);
        if (!item || PyList_Append(found, item) != 0) {
            Py_XDECREF(item);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(item);
    }
    return found;
}

static PyObject *py_tune(ARGS) {
    NEED(3) GROUP(g)
    g->direct_bytes = number(args[1]) < g->slot_bytes ? number(args[1]) : g->slot_bytes;
    if (small(args[2]) >= 0) g->spins = small(args[2]);
    return answer(0);
}

static PyObject *py_post(ARGS) {
    NEED(6) GROUP(g)
    int is_send = small(args[1]), peer = small(args[4]);
    u64 bytes = number(args[3]), tag = number(args[5]);
    PyObject *address = PyErr_Occurred() ? NULL : PyObject_CallMethod(args[2], "data_ptr", NULL);
    u8 *data = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    if (PyErr_Occurred()) return NULL;
    if (peer >= g->size || (peer < 0 && is_send)) {
        PyErr_Format(PyExc_ValueError, "there is no rank %d among %d", peer, g->size);
        return NULL;
    }
    Op *op;
    Py_BEGIN_ALLOW_THREADS
    op = post(g, is_send, data, bytes, peer, tag);
    Py_END_ALLOW_THREADS
    PyObject *name = op ? PyLong_FromVoidPtr(op) : PyErr_NoMemory();
    if (name && PyDict_SetItem(tensors_of(args[0]), name, args[2]) == 0) return name;
    if (op) forget(g, op);
    Py_XDECREF(name);
    return NULL;
}

static PyObject *py_state(ARGS) {
    NEED(2) GROUP(g)
    return answer(state_of(g, PyLong_AsVoidPtr(args[1])));
}

/* (outcome, source or lost peer, bytes that came) */
static PyObject *py_wait(ARGS) {
    NEED(3) GROUP(g)
    Op *op = PyLong_AsVoidPtr(args[1]);
    u64 timeout_ns = number(args[2]);
    int outcome, lost = -1;
    if (!op) return NULL;
    Py_BEGIN_ALLOW_THREADS
    outcome = wait_op(g, op, timeout_ns, &lost);
    Py_END_ALLOW_THREADS
    if (PyErr_Occurred()) return NULL;
    return Py_BuildValue("iiK", outcome, outcome == FINE || outcome == WRONG_SIZE ? op->source : lost,
                         (unsigned long long)op->moved);
}

static PyObject *py_forget(ARGS) {
    NEED(2) GROUP(g)
    forget(g, PyLong_AsVoidPtr(args[1]));
    PyDict_DelItem(tensors_of(args[0]), args[1]);
    return answer(0);
}

static PyObject *py_withdraw(ARGS) {
    NEED(2) GROUP(g)
    int is_gone = withdraw(g, PyLong_AsVoidPtr(args[1]));
    if (is_gone && PyDict_DelItem(tensors_of(args[0]), args[1]) != 0) return NULL;
    return PyBool_FromLong(is_gone);
}

static PyObject *py_serve(ARGS) {
    NEED(1) GROUP(g)
    Py_BEGIN_ALLOW_THREADS
    serve(g);
    Py_END_ALLOW_THREADS
    return answer(0);
}

static PyObject *py_stop(ARGS) {
    NEED(1) GROUP(g)
    stop_serving(g);
    return answer(0);
}

static PyObject *py_leave(ARGS) {
    NEED(1) GROUP(g)
    leave(g);
    return answer(0);
}

static PyObject *py_detach(ARGS) {
    NEED(1) GROUP(g)
    if (PyCapsule_SetName(args[0], "closed") != 0) return NULL;
    detach(g);
    return answer(0);
}

/* Copies count rows: row to[i] of the target is row from[i] of the source; NULL stands for 0, 1, 2, …
 * Returns the first i that is out of range, before anything is copied; -1 if all are in range. */
static int64_t copy_rows(const u8 *source, u64 source_rows, u8 *target, u64 target_rows, u64 row_bytes,
                         const u64 *from, const u64 *to, u64 count) {
    for (u64 i = 0; i < count; i++)
        if ((from ? from[i] : i) >= source_rows || (to ? to[i] : i) >= target_rows) return (int64_t)i;
    for (u64 i = 0; i < count; i++) {
        if (from && i + 4 < count)
            for (u64 line = 0; line < row_bytes && line < 8 * LINE; line += LINE)
                __builtin_prefetch(source + from[i + 4] * row_bytes + line);
        memcpy(target + (to ? to[i] : i) * row_bytes, source + (from ? from[i] : i) * row_bytes, row_bytes);
    }
    return -1;
}

static PyObject *py_copy_rows(ARGS) {
    NEED(8)
    u64 values[8];
    for (int i = 0; i < 8; i++) values[i] = number(args[i]);
    if (PyErr_Occurred()) return NULL;
    int64_t wrong;
    Py_BEGIN_ALLOW_THREADS
    wrong = copy_rows((const u8 *)values[0], values[1], (u8 *)values[2], values[3], values[4],
                      (const u64 *)values[5], (const u64 *)values[6], values[7]);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(wrong);
}

/* Row places[i] of the target (i, without places) becomes the row of ids[i]: index[ids[i] - low] is its
 * position + 1, and 0 or less if there is none. Returns the first i that has no row or no place, before
 * anything is copied; -1 if all have one. */
static int64_t take_rows(const int32_t *index, u64 entries, u64 low, const u64 *ids, u64 count, const u8 *rows,
                         u64 num_rows, u8 *target, u64 target_rows, const u64 *places, u64 row_bytes) {
    for (u64 i = 0; i < count; i++) {
        u64 slot = ids[i] - low;
        if (slot >= entries || index[slot] <= 0 || (u64)index[slot] > num_rows) return (int64_t)i;
        if ((places ? places[i] : i) >= target_rows) return (int64_t)i;
    }
    for (u64 i = 0; i < count; i++) {
        if (i + 4 < count) {
            const u8 *next = rows + (u64)(index[ids[i + 4] - low] - 1) * row_bytes;
            for (u64 line = 0; line < row_bytes && line < 8 * LINE; line += LINE) __builtin_prefetch(next + line);
        }
        memcpy(target + (places ? places[i] : i) * row_bytes, rows + (u64)(index[ids[i] - low] - 1) * row_bytes,
               row_bytes);
    }
    return -1;
}

/* index int32, low, ids int64, rows, target, places int64 or None, row_bytes */
static PyObject *py_take_rows(ARGS) {
    NEED(7)
    static const int FLAGS[6] = {PyBUF_SIMPLE, 0, PyBUF_SIMPLE, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_SIMPLE};
    Py_buffer views[6] = {{0}};
    u64 low = number(args[1]), row_bytes = number(args[6]);
    int64_t wrong = 0;
    int has_places = args[5] != Py_None;
    if (PyErr_Occurred()) return NULL;
    for (int i = 0; i < 6; i++) {
        if (i == 1 || (i == 5 && !has_places)) continue;
        if (PyObject_GetBuffer(args[i], &views[i], FLAGS[i]) != 0) goto done;
    }
    if (!row_bytes || (has_places && views[5].len != views[2].len)) {
        PyErr_SetString(PyExc_ValueError, "every row has a place, and at least one byte");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    wrong = take_rows(views[0].buf, (u64)views[0].len / 4, low, views[2].buf, (u64)views[2].len / 8, views[3].buf,
                      (u64)views[3].len / row_bytes, views[4].buf, (u64)views[4].len / row_bytes,
                      has_places ? views[5].buf : NULL, row_bytes);
    Py_END_ALLOW_THREADS
done:
    for (int i = 0; i < 6; i++)
        if (views[i].obj) PyBuffer_Release(&views[i]);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(wrong);
}

/* ---------------------------------------------------------------- light all-reduces
 *
 * Of plain numbers, where no other operation of this rank's queue is under way: begun and ended here, without the
 * queue. Python's lock of threads (GIL) makes each of `begin` and `end` one act. As soon as the queue is asked for
 * anything it takes the open one over (`take`), and it becomes an operation as all others. */
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *segment, *handle, *queue, *waiting, *is_locked, *codes, *work, *fallback, *open;
} Lane;

typedef struct {
    PyObject_HEAD
    Lane *lane;
    PyObject *keep, *error, *callbacks;
    char is_done, begun;
    u64 start_ns, end_ns;
} LightWork;

#define LIGHT_LOOKS 256 /* with Python's lock: some microseconds */
static struct {
    PyObject *dtype, *is_cpu, *is_contiguous, *data_ptr, *numel, *working, *timed, *carry_out, *timeout_ns, *check;
} names;

static int light_traverse(PyObject *object, visitproc visit, void *arg) {
    LightWork *w = (LightWork *)object;
    Py_VISIT(w->lane); Py_VISIT(w->keep); Py_VISIT(w->error); Py_VISIT(w->callbacks);
    return 0;
}
static int light_clear(PyObject *object) {
    LightWork *w = (LightWork *)object;
    Py_CLEAR(w->lane); Py_CLEAR(w->keep); Py_CLEAR(w->error); Py_CLEAR(w->callbacks);
    return 0;
}
static void light_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    light_clear(object);
    Py_TYPE(object)->tp_free(object);
}

static Group *group_of(const Lane *lane) {
    return PyCapsule_IsValid(lane->handle, NAME) ? PyCapsule_GetPointer(lane->handle, NAME) : NULL;
}

/* Nothing raised: the segment has nothing to say of this outcome. */
static int checked(const Lane *lane, int outcome) {
    PyObject *code = PyLong_FromLong(outcome);
    PyObject *said = code ? PyObject_CallMethodOneArg(lane->segment, names.check, code) : NULL;
    Py_XDECREF(code), Py_XDECREF(said);
    return said != NULL;
}

static PyObject *light_run(PyObject *object, PyObject *none) {
    (void)none;
    LightWork *w = (LightWork *)object;
    Group *g = group_of(w->lane);
    PyObject *timeout = PyObject_GetAttr(w->lane->segment, names.timeout_ns);
    if (!timeout) return NULL;
    u64 timeout_ns = number(timeout);
    Py_DECREF(timeout);
    int outcome = CLOSED;
    Py_BEGIN_ALLOW_THREADS
    if (g) outcome = finish_call(g, timeout_ns);
    Py_END_ALLOW_THREADS
    Py_CLEAR(w->keep);
    if (outcome && !checked(w->lane, outcome)) return NULL;
    Py_RETURN_NONE;
}

/* Where all ranks have come to it already, or do in a moment. */
static void end_light(LightWork *w) {
    Group *g = group_of(w->lane);
    for (int looks = g && !g->crowded ? LIGHT_LOOKS : 1; g && !all_reached(g, g->pass); relax())
        if (!--looks) return;
    if (!g) return;
    int outcome = finish_call(g, 0);
    w->is_done = 1;
    Py_CLEAR(w->keep);
    if (outcome && !checked(w->lane, outcome)) {
        PyObject *type, *trace;
        PyErr_Fetch(&type, &w->error, &trace);
        PyErr_NormalizeException(&type, &w->error, &trace);
        Py_XDECREF(type), Py_XDECREF(trace);
    }
    Py_CLEAR(w->lane->open); /* this may be the last reference but the caller's */
}

static PyObject *light_wait(PyObject *object, PyObject *none) {
    (void)none;
    LightWork *w = (LightWork *)object;
    if (!w->is_done && w->lane->open == object) end_light(w);
    if (!w->is_done) {
        PyObject *ended = PyObject_CallMethodOneArg(w->lane->queue, names.carry_out, object);
        Py_XDECREF(ended);
        if (!ended) return NULL;
    }
    if (!w->error || w->error == Py_None) Py_RETURN_NONE;
    PyErr_SetObject((PyObject *)Py_TYPE(w->error), w->error);
    return NULL;
}

static PyObject *light_queue(PyObject *object, void *closure) {
    (void)closure;
    return Py_NewRef(((LightWork *)object)->lane->queue);
}

static PyMemberDef light_members[] = {
    {"is_done", T_BOOL, offsetof(LightWork, is_done), 0, NULL}, {"begun", T_BOOL, offsetof(LightWork, begun), 0, NULL},
    {"error", T_OBJECT, offsetof(LightWork, error), 0, NULL},
    {"callbacks", T_OBJECT, offsetof(LightWork, callbacks), 0, NULL},
    {"start_ns", T_ULONGLONG, offsetof(LightWork, start_ns), 0, NULL},
    {"end_ns", T_ULONGLONG, offsetof(LightWork, end_ns), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyMethodDef light_methods[] = {
    {"wait", light_wait, METH_NOARGS, NULL}, {"run", light_run, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyGetSetDef light_getters[] = {{"queue", light_queue, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyTypeObject light_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shoal.comm.transport.shm._shm.LightWork", .tp_basicsize = sizeof(LightWork),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, .tp_dealloc = light_dealloc,
    .tp_traverse = light_traverse, .tp_clear = light_clear, .tp_members = light_members,
    .tp_methods = light_methods, .tp_getset = light_getters, .tp_new = PyType_GenericNew};

static int lane_traverse(PyObject *object, visitproc visit, void *arg) {
    Lane *l = (Lane *)object;
    Py_VISIT(l->segment); Py_VISIT(l->handle); Py_VISIT(l->queue); Py_VISIT(l->waiting); Py_VISIT(l->is_locked);
    Py_VISIT(l->codes); Py_VISIT(l->work); Py_VISIT(l->fallback); Py_VISIT(l->open);
    return 0;
}
static int lane_clear(PyObject *object) {
    Lane *l = (Lane *)object;
    Py_CLEAR(l->segment); Py_CLEAR(l->handle); Py_CLEAR(l->queue); Py_CLEAR(l->waiting); Py_CLEAR(l->is_locked);
    Py_CLEAR(l->codes); Py_CLEAR(l->work); Py_CLEAR(l->fallback); Py_CLEAR(l->open);
    return 0;
}
static void lane_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    lane_clear(object);
    Py_TYPE(object)->tp_free(object);
}

/* What a method of a tensor says. */
static u64 asked(PyObject *data, PyObject *name) {
    PyObject *said = PyObject_CallMethodNoArgs(data, name);
    u64 found = said ? said == Py_True ? 1 : said == Py_False ? 0 : number(said) : 0;
    Py_XDECREF(said);
    return found;
}

static int is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    Py_XDECREF(value); /* True and False stay */
    return value == Py_True;
}

/* 0: the queue has something under way, or a thread is changing it. */
static int is_idle(const Lane *l) {
    if (l->open || PyObject_Size(l->waiting) || is_true(l->queue, names.working) || is_true(l->queue, names.timed))
        return 0;
    PyObject *locked = PyObject_CallNoArgs(l->is_locked);
    Py_XDECREF(locked);
    return locked == Py_False;
}

/* The work of an all-reduce of `data` in place, begun; NULL without an error: it is none for here. */
static PyObject *begin_light(Lane *l, PyObject *data) {
    PyObject *dtype = PyObject_GetAttr(data, names.dtype);
    PyObject *code = dtype ? PyDict_GetItemWithError(l->codes, dtype) : NULL;
    Py_XDECREF(dtype);
    if (!code || !is_true(data, names.is_cpu) || !asked(data, names.is_contiguous)) return NULL;
    u64 at = asked(data, names.data_ptr), n = asked(data, names.numel);
    LightWork *w = PyErr_Occurred() ? NULL : (LightWork *)PyType_GenericAlloc((PyTypeObject *)l->work, 0);
    if (!w) return NULL;
    Call c = {.kind = ALL_REDUCE, .in = (const u8 *)at, .out = (u8 *)at, .count = n, .dtype = small(code), .op = SUM};
    Group *g = is_idle(l) ? group_of(l) : NULL;
    if (PyErr_Occurred() || !g || !start_call(g, &c)) {
        Py_DECREF(w);
        return NULL;
    }
    w->begun = 1;
    w->lane = (Lane *)Py_NewRef(l);
    w->keep = Py_NewRef(data);
    l->open = Py_NewRef(w);
    return (PyObject *)w;
}

static PyObject *lane_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    Lane *l = (Lane *)self;
    PyObject *work = count == 1 && !keywords && !l->open ? begin_light(l, args[0]) : NULL;
    if (work) return work;
    PyErr_Clear();
    return PyObject_Vectorcall(l->fallback, args, (size_t)count, keywords);
}

static PyObject *lane_take(PyObject *self, PyObject *none) {
    (void)none;
    Lane *l = (Lane *)self;
    PyObject *open = l->open;
    l->open = NULL;
    if (open) return open;
    Py_RETURN_NONE;
}

static PyMethodDef lane_methods[] = {
    {"all_reduce", (PyCFunction)(void (*)(void))lane_all_reduce, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"take", lane_take, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyTypeObject lane_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "shoal.comm.transport.shm._shm.Lane", .tp_basicsize = sizeof(Lane),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, .tp_dealloc = lane_dealloc, .tp_traverse = lane_traverse,
    .tp_clear = lane_clear, .tp_methods = lane_methods};

/* lane(segment, handle, queue, waiting, is_locked, codes, work, fallback) */
static PyObject *py_lane(ARGS) {
    NEED(8)
    if (!PyDict_Check(args[5]) || !PyType_Check(args[6]) || !PyType_IsSubtype((PyTypeObject *)args[6], &light_type)) {
        PyErr_SetString(PyExc_TypeError, "a lane needs a dict of codes and a subclass of LightWork");
        return NULL;
    }
    Lane *l = (Lane *)PyType_GenericAlloc(&lane_type, 0);
    if (!l) return NULL;
    PyObject **fields[] = {&l->segment, &l->handle, &l->queue, &l->waiting,
                           &l->is_locked, &l->codes, &l->work, &l->fallback};
    for (int i = 0; i < 8; i++) *fields[i] = Py_NewRef(args[i]);
    return (PyObject *)l;
}

static int add_light(PyObject *module) {
    const char *texts[] = {"dtype", "is_cpu", "is_contiguous", "data_ptr", "numel", "_working", "timed", "carry_out",
                           "timeout_ns", "check"};
    PyObject **all[] = {&names.dtype, &names.is_cpu, &names.is_contiguous, &names.data_ptr, &names.numel,
                        &names.working, &names.timed, &names.carry_out, &names.timeout_ns, &names.check};
    for (int i = 0; i < 10; i++)
        if (!*all[i] && !(*all[i] = PyUnicode_InternFromString(texts[i]))) return -1;
    if (PyType_Ready(&lane_type)) return -1;
    return PyModule_AddType(module, &light_type);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    METHOD(create), METHOD(attach), METHOD(watch), METHOD(pidfd), METHOD(collective), METHOD(start), METHOD(finish),
    METHOD(failure), METHOD(waiting), METHOD(pid), METHOD(history), METHOD(tune), METHOD(post), METHOD(state), METHOD(wait),
    METHOD(forget), METHOD(withdraw), METHOD(serve), METHOD(stop), METHOD(leave), METHOD(detach),
    METHOD(copy_rows), METHOD(take_rows), METHOD(lane), {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shm", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shm(void) {
    check_signals = signals;
    PyObject *made = PyModule_Create(&module);
    if (made && add_light(made) == 0) return made;
    Py_XDECREF(made);
    return NULL;
}
#endif
