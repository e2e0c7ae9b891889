/* Runs the native part under a sanitizer: ranks as threads, then as processes of which one dies. */
#define SHOAL_WITHOUT_PYTHON
#include "../../shoal/comm/transport/shm/_shm.c"

#include <sys/wait.h>

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);     \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

enum { RANKS = 3, SLOT = 4096, RING = 8192, ROUNDS = 60 };
static const u64 PATIENCE_NS = 20000000000ull;
static int segment;

static int call(Group *g, int kind, void *in, void *out, u64 count, int dtype, int op, int root) {
    Call c = {.kind = kind, .in = in, .out = out, .count = count, .dtype = dtype, .op = op,
              .root = root};
    if (count % 2 && start_call(g, &c)) return finish_call(g, PATIENCE_NS);
    return run_call(g, &c, PATIENCE_NS);
}

static void reductions(Group *g, u64 n, int round) {
    int64_t *data = malloc(n * 8 * RANKS), *whole = malloc(n * 8 * RANKS);
    int root = round % RANKS;
    for (u64 i = 0; i < n * RANKS; i++) data[i] = (int64_t)i + g->rank;
    CHECK(call(g, ALL_REDUCE, data, data, n, I64, SUM, 0) == FINE);
    for (u64 i = 0; i < n; i++) CHECK(data[i] == 3 * (int64_t)i + 3);
    CHECK(call(g, ALL_GATHER, data, whole, n, I64, SUM, 0) == FINE);
    for (u64 i = 0; i < n * RANKS; i++) CHECK(whole[i] == 3 * (int64_t)(i % n) + 3);
    CHECK(call(g, REDUCE_SCATTER, whole, data, n, I64, MAX, 0) == FINE);
    for (u64 i = 0; i < n; i++) CHECK(data[i] == 3 * (int64_t)i + 3);
    CHECK(call(g, ALL_TO_ALL, whole, whole, n, I64, SUM, 0) == FINE);
    data[0] = g->rank;
    CHECK(call(g, BROADCAST, data, data, n, I64, SUM, root) == FINE);
    CHECK(data[0] == root);
    CHECK(call(g, REDUCE, data, data, n, I64, SUM, root) == FINE);
    CHECK(call(g, GATHER, data, whole, n, I64, SUM, root) == FINE);
    CHECK(call(g, SCATTER, whole, data, n, I64, SUM, root) == FINE);
    data[0] = 1;
    CHECK(call(g, SCAN, data, data, n, I64, SUM, 0) == FINE);
    CHECK(data[0] == g->rank + 1);
    CHECK(call(g, BARRIER, NULL, NULL, 0, U8, SUM, 0) == FINE);
    free(data);
    free(whole);
}

static void halves(Group *g, u64 n) {
    uint16_t *data = malloc(n * 2);
    for (u64 i = 0; i < n; i++) data[i] = 0x3f80; /* 1 in bfloat16 */
    CHECK(call(g, ALL_REDUCE, data, data, n, BF16, SUM, 0) == FINE);
    for (u64 i = 0; i < n; i++) CHECK(data[i] == 0x4040);
    free(data);
}

static void messages(Group *g, u64 n, int round) {
    int next = (g->rank + 1) % RANKS, before = (g->rank + RANKS - 1) % RANKS, lost;
    u8 *given = malloc(n), *found = malloc(n);
    memset(given, g->rank + 1, n);
    Op *late = post(g, 1, given, n, next, (u64)round * 2);
    Op *early = post(g, 1, given, n, next, (u64)round * 2 + 1);
    CHECK(withdraw(g, post(g, 0, found, n, -1, (u64)1 << 60)));
    for (u64 tag = 0; tag < 2; tag++) {
        Op *op = post(g, 0, found, n, tag ? before : -1, (u64)round * 2 + 1 - tag);
        CHECK(wait_op(g, op, PATIENCE_NS, &lost) == FINE && op->source == before);
        CHECK(n == 0 || (found[0] == before + 1 && found[n - 1] == before + 1));
        CHECK(!withdraw(g, op));
        forget(g, op);
    }
    CHECK(wait_op(g, late, PATIENCE_NS, &lost) == FINE);
    CHECK(wait_op(g, early, PATIENCE_NS, &lost) == FINE);
    forget(g, late);
    forget(g, early);
    free(given);
    free(found);
}

static void *serving(void *group) {
    serve(group);
    return NULL;
}

static void *one_rank(void *argument) {
    Group *g = argument;
    pthread_t server;
    CHECK(pthread_create(&server, NULL, serving, g) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        g->direct_bytes = round % 3 ? 1024 : 0;
        u64 n = 1 + (u64)(round * round * 7) % 3000;
        reductions(g, n, round);
        halves(g, n);
        messages(g, n * 9 - 9, round);
    }
    stop_serving(g);
    pthread_join(server, NULL);
    CHECK(call(g, BARRIER, NULL, NULL, 0, U8, SUM, 0) == FINE);
    leave(g);
    return NULL;
}

/* All ranks use one mapping: the thread sanitizer looks at addresses. */
static void as_threads(void) {
    pthread_t threads[RANKS];
    Group *groups[RANKS];
    u8 *own[RANKS];
    CHECK((segment = create_segment(RANKS, SLOT, RING, 7)) >= 0);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK((groups[rank] = attach(segment, rank, RANKS, 7)) != NULL);
        own[rank] = groups[rank]->base;
        groups[rank]->base = own[0], groups[rank]->head = (Header *)own[0];
    }
    for (int rank = 0; rank < RANKS; rank++)
        CHECK(pthread_create(&threads[rank], NULL, one_rank, groups[rank]) == 0);
    for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    for (int rank = 0; rank < RANKS; rank++) {
        groups[rank]->base = own[rank];
        detach(groups[rank]);
    }
    close(segment);
}

/* Rank 2 calls something else or dies; the others must be told. */
static int troubled(int rank, int dies) {
    Group *g = attach(segment, rank, RANKS, 7);
    float one = 1;
    CHECK(g && call(g, BARRIER, NULL, NULL, 0, U8, SUM, 0) == FINE);
    watch_peers(g);
    if (rank == 2 && dies) kill(getpid(), SIGKILL);
    int outcome = rank == 2 ? call(g, ALL_REDUCE, &one, &one, 1, F32, MAX, 0)
                            : call(g, ALL_REDUCE, &one, &one, 1, F32, SUM, 0);
    if (outcome == FINE) outcome = call(g, BARRIER, NULL, NULL, 0, U8, SUM, 0);
    CHECK(outcome == (dies ? LOST : DESYNC));
    detach(g);
    return 0;
}

static void as_processes(int dies) {
    CHECK((segment = create_segment(RANKS, SLOT, RING, 7)) >= 0);
    for (int rank = 0; rank < RANKS; rank++)
        if (fork() == 0) _exit(troubled(rank, dies));
    for (int rank = 0, status; rank < RANKS; rank++) {
        CHECK(wait(&status) > 0);
        CHECK(WIFSIGNALED(status) ? dies : WEXITSTATUS(status) == 0);
    }
    close(segment);
}

int main(void) {
    as_processes(0);
    as_processes(1);
    as_threads();
    puts("fine");
    return 0;
}
