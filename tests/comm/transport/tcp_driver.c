/* Runs the engine of the TCP transport under a sanitizer: ranks as threads, a peer that writes
 * wrong frames, a peer that ends in the middle, a peer process that is killed. */
#include "../../shoal/comm/transport/tcp/engine.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);     \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

enum { RANKS = 3, STREAMS = 3, ROUNDS = 12, F32 = 7, ADD = 0, ANY = -1 };
static const u64 PATIENCE_NS = 20000000000ull;
static const u64 SIZES[] = {0, 4, 4096, EAGER_BYTES, EAGER_BYTES + 4, 3 * FRAGMENT_BYTES + 20};
enum { NUM_SIZES = sizeof SIZES / sizeof *SIZES };

/* ---------------------------------------------------------------- operations */

static Op *begin(Engine *e, int is_send, int peer, u64 tag, void *data, u64 bytes, int operator) {
    Op *op = calloc(1, sizeof *op);
    CHECK(op);
    op->is_send = is_send;
    op->peer = peer;
    op->tag = tag;
    op->data = data;
    op->bytes = bytes;
    op->dtype = F32;
    op->operator = operator;
    op->descriptor_bytes = 1;
    op->descriptor[0] = F32;
    post(e, op);
    return op;
}

static int end(Engine *e, Op *op, u64 patience_ns) {
    int state = wait_for(e, op, patience_ns);
    if (state < 0) state = expire(e, op);
    forget(e, op);
    return state;
}

/* ends[i][j][s]: the end that rank i has of stream s to rank j */
static void connect_all(int ends[RANKS][RANKS][STREAMS]) {
    for (int i = 0; i < RANKS; i++)
        for (int j = 0; j < i; j++)
            for (int s = 0; s < STREAMS; s++) {
                int both[2];
                CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both));
                ends[i][j][s] = both[0];
                ends[j][i][s] = both[1];
            }
}

/* ---------------------------------------------------------------- ranks as threads */

static Engine *engines[RANKS];

static void exchange(Engine *e, int round) {
    int next = (e->rank + 1) % RANKS, before = (e->rank + RANKS - 1) % RANKS;
    for (int i = 0; i < NUM_SIZES; i++) {
        u64 bytes = SIZES[i], n = bytes / 4, tag = (u64)round * NUM_SIZES + (u64)i;
        float *given = malloc(bytes + 1), *copied = malloc(bytes + 1), *added = malloc(bytes + 1);
        for (u64 k = 0; k < n; k++) given[k] = (float)(e->rank + 1), added[k] = 0.5f;
        Op *sent = begin(e, 1, next, tag, given, bytes, COPY);
        Op *again = begin(e, 1, next, tag, given, bytes, COPY);
        Op *copies = begin(e, 0, round % 2 ? before : ANY, tag, copied, bytes, COPY);
        Op *adds = begin(e, 0, before, tag, added, bytes, ADD);
        CHECK(state_of(e, copies) <= FINE);
        CHECK(end(e, copies, PATIENCE_NS) == FINE && end(e, adds, PATIENCE_NS) == FINE);
        CHECK(end(e, sent, PATIENCE_NS) == FINE && end(e, again, PATIENCE_NS) == FINE);
        for (u64 k = 0; k < n; k++) {
            CHECK(copied[k] == (float)(before + 1));
            CHECK(added[k] == (float)(before + 1) + 0.5f);
        }
        free(given), free(copied), free(added);
    }
}

/* Receives that do not fit, come too late, or are forgotten. */
static void troubles(Engine *e) {
    int next = (e->rank + 1) % RANKS, before = (e->rank + RANKS - 1) % RANKS;
    u64 bytes = 2 * FRAGMENT_BYTES;
    u8 *given = calloc(1, bytes), *found = calloc(1, bytes);
    Op *sent = begin(e, 1, next, 1u << 20, given, bytes, COPY);
    CHECK(end(e, begin(e, 0, before, 1u << 20, found, bytes / 2, COPY), PATIENCE_NS) == MISMATCH);
    CHECK(end(e, sent, PATIENCE_NS) == FINE);
    CHECK(end(e, begin(e, 0, before, 1u << 21, found, 4, COPY), 1000000) == LATE);
    CHECK(end(e, begin(e, 1, next, 1u << 22, given, bytes, COPY), 1000000) == LATE);
    forget(e, begin(e, 0, before, 1u << 23, found, 4, COPY));
    forget(e, begin(e, 1, next, 1u << 23, given, 4, COPY));
    free(given), free(found);
}

/* All peers send to rank 0, so that none is to get ahead of the others. */
static void star(Engine *e) {
    enum { MESSAGES = 16, NUMBERS = FRAGMENT_BYTES / 2 };
    u64 tag = 1u << 24, bytes = NUMBERS * sizeof(float);
    float *data = calloc((size_t)RANKS * MESSAGES * NUMBERS, sizeof *data);
    Op *ops[RANKS * MESSAGES];
    int count = 0;
    CHECK(data);
    for (int m = 0; m < MESSAGES; m++)
        for (int peer = 1; peer < RANKS; peer++) {
            if (e->rank && peer != e->rank) continue;
            float *at = data + (size_t)count * NUMBERS;
            for (int k = 0; e->rank && k < NUMBERS; k++) at[k] = (float)(MESSAGES * peer + m);
            ops[count++] = begin(e, e->rank != 0, e->rank ? 0 : peer, tag, at, bytes, COPY);
        }
    for (int i = 0; i < count; i++) CHECK(end(e, ops[i], PATIENCE_NS) == FINE);
    for (int i = 0; !e->rank && i < count; i++) {
        int peer = 1 + i % (RANKS - 1), m = i / (RANKS - 1);
        for (int k = 0; k < NUMBERS; k++)
            CHECK(data[(size_t)i * NUMBERS + (size_t)k] == (float)(MESSAGES * peer + m));
    }
    free(data);
}

static void *one_rank(void *argument) {
    Engine *e = argument;
    for (int round = 0; round < ROUNDS; round++) exchange(e, round);
    troubles(e);
    exchange(e, ROUNDS);
    star(e);
    return NULL;
}

static void as_threads(void) {
    static int ends[RANKS][RANKS][STREAMS];
    pthread_t threads[RANKS];
    connect_all(ends);
    for (int i = 0; i < RANKS; i++) {
        CHECK((engines[i] = create(i, RANKS)) != NULL);
        for (int j = 0; j < RANKS; j++)
            if (i != j) CHECK(add_peer(engines[i], j, ends[i][j], STREAMS));
    }
    for (int i = 0; i < RANKS; i++) CHECK(!pthread_create(&threads[i], NULL, one_rank, engines[i]));
    for (int i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
    float number = 1;
    leave_space(engines[0], 0);
    CHECK(end(engines[1], begin(engines[1], 0, 0, 9, &number, 4, COPY), PATIENCE_NS) == LOST);
    CHECK(end(engines[0], begin(engines[0], 0, 1, 9, &number, 4, COPY), PATIENCE_NS) == CLOSED);
    Op *waits = begin(engines[2], 0, 1, 9, &number, 4, COPY);
    stop(engines[1]);
    CHECK(end(engines[2], waits, PATIENCE_NS) == LOST);
    stop(engines[0]), stop(engines[2]);
    for (int i = 0; i < RANKS; i++) destroy(engines[i]);
}

/* ---------------------------------------------------------------- a hostile peer */

static u64 state = 0x9e3779b97f4a7c15ull;
static u64 drawn(u64 below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state % below;
}

/* Mostly frames that nearly fit: numbers of messages, tags and offsets that are in use. */
static Head frame_of(void) {
    static const u64 edges[] = {0, 1, 63, 64, 4096, EAGER_BYTES, EAGER_BYTES + 1, FRAGMENT_BYTES,
                                FRAGMENT_BYTES + 1, 2 * FRAGMENT_BYTES, ~0ull, 1ull << 63};
    enum { NUM_EDGES = sizeof edges / sizeof *edges };
    Head h = {.magic = MAGIC, .kind = 1 + (u32)drawn(drawn(50) ? 7 : 9), .descriptor_bytes = 1};
    h.tag = drawn(3);
    h.message = drawn(4);
    h.bytes = edges[drawn(NUM_EDGES)];
    h.offset = drawn(3) ? drawn(3) * FRAGMENT_BYTES : edges[drawn(NUM_EDGES)];
    h.descriptor[0] = F32;
    if (drawn(20)) h.bytes = h.kind == RTS ? 2 * FRAGMENT_BYTES : 4096;
    if (h.kind == DATA && drawn(20)) h.bytes = FRAGMENT_BYTES >> drawn(2), h.offset = drawn(2) * FRAGMENT_BYTES;
    if (!drawn(40)) h.descriptor_bytes = (u32)drawn(300);
    if (!drawn(60)) ((u8 *)&h)[drawn(sizeof h)] ^= (u8)(1 + drawn(255));
    return h;
}

static void write_some(int fd, const void *data, u64 bytes) {
    if (bytes && send(fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) return;
}

static void attack(const int *fds, int number) {
    static u8 payload[FRAGMENT_BYTES], answers[1 << 16];
    for (int i = 0; i < 40; i++) {
        Head h = frame_of();
        int fd = fds[h.kind != DATA && drawn(20) ? 0 : drawn(STREAMS)];
        u64 cut = drawn(30) ? sizeof h : drawn(sizeof h);
        write_some(fd, &h, cut);
        int has_payload = h.kind == EAGER || h.kind == DATA;
        if (has_payload) write_some(fd, payload, drawn(9) ? least(h.bytes, sizeof payload) : drawn(4096));
        if (!drawn(4))
            while (recv(fds[0], answers, sizeof answers, MSG_DONTWAIT) > 0) {}
        if (number % 3 == 0 && !drawn(30)) shutdown(fd, SHUT_RDWR);
    }
}

static void pair(int *ours, int *theirs) {
    for (int s = 0; s < STREAMS; s++) {
        int both[2];
        CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, both));
        CHECK(!fcntl(both[0], F_SETFL, O_NONBLOCK));
        ours[s] = both[0], theirs[s] = both[1];
    }
}

/* Fragments of two streams overlap: the message must not be whole while one is in its middle. */
static void overlapping(void) {
    static u8 memory[2 * FRAGMENT_BYTES], given[FRAGMENT_BYTES];
    int ours[STREAMS], theirs[STREAMS];
    pair(ours, theirs);
    Engine *e = create(0, 2);
    CHECK(e && add_peer(e, 1, ours, STREAMS));
    Op *op = begin(e, 0, 1, 1, memory, sizeof memory, COPY);
    Head h = {.magic = MAGIC, .kind = RTS, .descriptor_bytes = 1, .tag = 1, .bytes = sizeof memory};
    h.descriptor[0] = F32;
    CHECK(send(theirs[0], &h, sizeof h, MSG_NOSIGNAL) == sizeof h);
    CHECK(recv(theirs[0], &h, sizeof h, MSG_WAITALL) == sizeof h && h.kind == CTS);
    h.kind = DATA, h.bytes = FRAGMENT_BYTES, h.message = 0;
    CHECK(send(theirs[1], &h, sizeof h, MSG_NOSIGNAL) == sizeof h);
    CHECK(send(theirs[1], given, FRAGMENT_BYTES / 2, MSG_NOSIGNAL) == FRAGMENT_BYTES / 2);
    usleep(20000);
    for (int i = 0; i < 2; i++) {
        h.bytes = FRAGMENT_BYTES >> i;
        if (send(theirs[2], &h, sizeof h, MSG_NOSIGNAL) < 0) break;
        if (send(theirs[2], given, h.bytes, MSG_NOSIGNAL) < 0) break;
    }
    usleep(20000);
    if (send(theirs[1], given, FRAGMENT_BYTES / 2, MSG_NOSIGNAL) < 0) errno = 0;
    CHECK(end(e, op, PATIENCE_NS) == LOST);
    for (int s = 0; s < STREAMS; s++) close(theirs[s]);
    stop(e);
    destroy(e);
}

static void hostile(int number) {
    int ours[STREAMS], theirs[STREAMS];
    static float memory[6][2 * FRAGMENT_BYTES / 4];
    Op *ops[6];
    pair(ours, theirs);
    Engine *e = create(0, 2);
    CHECK(e && add_peer(e, 1, ours, STREAMS));
    for (int i = 0; i < 6; i++) {
        u64 bytes = i % 2 ? 2 * FRAGMENT_BYTES : 4096;
        ops[i] = begin(e, i > 3, 1, (u64)i % 3, memory[i], bytes, i % 2 ? COPY : ADD);
    }
    attack(theirs, number);
    for (int s = 0; s < STREAMS; s++) close(theirs[s]);
    for (int i = 0; i < 6; i++) end(e, ops[i], PATIENCE_NS);
    stop(e);
    destroy(e);
}

/* ---------------------------------------------------------------- a peer process that is killed */

static void killed(void) {
    int ours[STREAMS], theirs[STREAMS];
    static u8 data[8 * FRAGMENT_BYTES];
    pair(ours, theirs);
    pid_t child = fork();
    if (!child) {
        for (int s = 0; s < STREAMS; s++) close(ours[s]);
        Engine *e = create(1, 2);
        for (int s = 0; s < STREAMS; s++) CHECK(!fcntl(theirs[s], F_SETFL, O_NONBLOCK));
        CHECK(e && add_peer(e, 0, theirs, STREAMS));
        CHECK(end(e, begin(e, 1, 0, 1, data, sizeof data, COPY), PATIENCE_NS) == FINE);
        kill(getpid(), SIGKILL);
    }
    for (int s = 0; s < STREAMS; s++) close(theirs[s]);
    Engine *e = create(0, 2);
    CHECK(e && add_peer(e, 1, ours, STREAMS));
    CHECK(end(e, begin(e, 0, 1, 1, data, sizeof data, COPY), PATIENCE_NS) == FINE);
    CHECK(end(e, begin(e, 0, ANY, 2, data, 4, COPY), PATIENCE_NS) == LOST);
    CHECK(end(e, begin(e, 1, 1, 3, data, sizeof data, COPY), PATIENCE_NS) == LOST);
    stop(e);
    destroy(e);
    CHECK(waitpid(child, NULL, 0) == child);
}

int main(int count, char **words) {
    int attacks = count > 1 ? atoi(words[1]) : 400;
    killed();
    as_threads();
    overlapping();
    for (int i = 0; i < attacks; i++) hostile(i);
    puts("fine");
    return 0;
}
