/* Runs the native parts of rows under sanitizers: random ids, wrong ids, answers in pieces. */
#define SHOAL_WITHOUT_PYTHON
#include "../../shoal/server/embedding/_rows.c"
#include "../../shoal/server/protocol/_frames.c"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);     \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

enum { ROWS = 100, MOST = 300 };

static int go_on(void) { return 1; }

static void routes(u64 servers, u64 count, u64 turn, const int32_t *hot) {
    u64 ids[MOST], ordered[MOST], places[MOST], counts[2 * MAX_SERVERS], sum = 0;
    for (u64 i = 0; i < count; i++) ids[i] = (u64)rand() % ROWS;
    Pull pull = {.ids = ids, .hot = hot, .count = count, .num_rows = ROWS,
                 .width = (ROWS + servers - 1) / servers, .servers = servers, .turn = turn};
    CHECK(route(&pull, ordered, places, counts) == ALL_FINE);
    for (u64 key = 0; key < 2 * servers; key++) {
        for (u64 i = sum; i < sum + counts[key]; i++) {
            CHECK(ordered[i] == ids[places[i]]);
            CHECK((key % 2 == 1) == (ordered[i] / pull.width == key / 2));
            CHECK(key % 2 == 1 || hot[ordered[i]] >= 0);
        }
        sum += counts[key];
    }
    CHECK(sum == count);
    if (!count) return;
    ids[count - 1] = ROWS;
    CHECK(route(&pull, ordered, places, counts) == (int64_t)count - 1);
    ids[count - 1] = (u64)-1;
    CHECK(route(&pull, ordered, places, counts) == (int64_t)count - 1);
}

static void places_and_counts(void) {
    Permutation p = {ROWS, 10, 10, {1, 2, 3, ~0ull}};
    u64 ids[ROWS], owners[ROWS], slots[ROWS];
    int64_t counts[ROWS] = {0};
    for (u64 i = 0; i < ROWS; i++) ids[i] = i;
    CHECK(locate(&p, ids, ROWS, 3, owners, slots) == ALL_FINE);
    for (u64 i = 0; i < ROWS; i++) ids[i] = slots[i] * 3 + owners[i];
    CHECK(count_ids(counts, ROWS, ids, ROWS) == ALL_FINE);
    for (u64 i = 0; i < ROWS; i++) CHECK(counts[i] == 1);
    ids[7] = ~0ull;
    CHECK(count_ids(counts, ROWS, ids, ROWS) == 7 && locate(&p, ids, ROWS, 3, owners, slots) == 7);
}

static void gathers(void) {
    enum { HELD = 6 };
    const int32_t index[] = {1, 0, 3, 6, -2, 7}, copied[ROWS] = {[4] = 2, [9] = 1};
    float rows[HELD], copies[2] = {20, 21}, target[4] = {0};
    u64 ids[] = {4, 9, 50, 53}, places[] = {3, 2, 1, 0};
    int64_t counts[ROWS] = {0}, copy_counts[ROWS] = {0};
    for (int i = 0; i < HELD; i++) rows[i] = (float)i;
    Gather g = {.ids = ids, .places = places, .count = 4, .copies = 2, .row_bytes = 4, .target_rows = 4, .counted = ROWS,
                .target = (u8 *)target, .counts = counts, .copy_counts = copy_counts,
                .copied = {copied, ROWS, 0, (const u8 *)copies, 2}, .owned = {index, 6, 50, (const u8 *)rows, HELD}};
    CHECK(gather(&g) == ALL_FINE);
    CHECK(target[3] == 21 && target[2] == 20 && target[1] == 0 && target[0] == 5);
    CHECK(counts[4] == 1 && counts[50] == 1 && copy_counts[9] == 1 && !copy_counts[50]);
    static const u64 WRONG[] = {51, 54, 55, 56, 49, 0, (u64)-1};
    for (size_t i = 0; i < sizeof WRONG / sizeof *WRONG; i++) {
        ids[3] = WRONG[i];
        CHECK(gather(&g) == 3);
    }
    ids[3] = 52;
    places[0] = 4;
    CHECK(gather(&g) == 0 && counts[4] == 1);
    places[0] = 3;
    g.counted = 52;
    CHECK(gather(&g) == 3);
}

static int ends[2];
static uint8_t frame[HEADER + 9000];

static void *answer(void *unused) {
    for (size_t at = 0; at < sizeof frame; at += 1000) {
        size_t rest = sizeof frame - at;
        CHECK(write(ends[1], frame + at, rest < 1000 ? rest : 1000) > 0);
    }
    return unused;
}

static void answers(void) {
    pthread_t thread;
    int64_t awaited = -1;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    frame[META_AT] = 9000 & 255;
    frame[META_AT + 1] = 9000 >> 8;
    Exchange e = {.fd = ends[0], .parts = {{"", 0}, {"abc", 3}}, .num_parts = 2, .answer = malloc(FIRST)};
    send_all(&e, 1);
    CHECK(!e.error);
    CHECK(pthread_create(&thread, NULL, answer, NULL) == 0);
    receive_all(&e, 1, &awaited);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(!e.error && !awaited && e.answer_bytes == sizeof frame && !memcmp(e.answer, frame, sizeof frame));
    frame[PAYLOAD_AT] = 1;
    CHECK(write(ends[1], frame, HEADER) == HEADER);
    e.answer_bytes = 0;
    CHECK(!receive_answer(&e) && e.error == EPROTO);
    close(ends[1]);
    e.answer_bytes = 0;
    CHECK(!receive_answer(&e) && e.error == ECONNRESET);
    e.num_parts = 1;
    e.parts[0] = (struct iovec){"abc", 3};
    CHECK(!send_request(&e) && e.error == EPIPE);
    free(e.answer);
    close(ends[0]);
}

static void rows_in_pieces(void) {
    enum { COUNT = 3, BYTES = 700 };
    static uint8_t rows[4 * BYTES];
    const uint64_t places[COUNT] = {3, 0, 1};
    pthread_t thread;
    int64_t awaited = -1;
    struct pollfd polled[1];
    Target target = {rows, 4, BYTES};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    memset(frame, 0, HEADER);
    frame[META_AT] = (sizeof frame - HEADER - COUNT * BYTES) & 255;
    frame[META_AT + 1] = (sizeof frame - HEADER - COUNT * BYTES) >> 8;
    frame[PAYLOAD_AT] = (COUNT * BYTES) & 255;
    frame[PAYLOAD_AT + 1] = (COUNT * BYTES) >> 8;
    for (size_t i = HEADER; i < sizeof frame; i++) frame[i] = (uint8_t)(i / 100);
    Exchange e = {.fd = ends[0], .places = places, .num_places = COUNT, .answer = malloc(FIRST)};
    CHECK(pthread_create(&thread, NULL, answer, NULL) == 0);
    receive_rows(&e, 1, &target, polled, &awaited);
    CHECK(pthread_join(thread, NULL) == 0);
    const uint8_t *sent = frame + sizeof frame - COUNT * BYTES;
    CHECK(!e.error && e.row_bytes_done == COUNT * BYTES && !memcmp(e.answer, frame, e.answer_bytes));
    for (int i = 0; i < COUNT; i++) CHECK(!memcmp(rows + places[i] * BYTES, sent + i * BYTES, BYTES));
    e.answer_bytes = e.row_bytes_done = 0;
    e.num_places = 2;
    CHECK(write(ends[1], frame, HEADER) == HEADER);
    receive_rows(&e, 1, &target, polled, &awaited);
    CHECK(e.error == EPROTO);
    e = (Exchange){.fd = ends[0], .places = places, .num_places = COUNT, .answer = e.answer};
    close(ends[1]);
    receive_rows(&e, 1, &target, polled, &awaited);
    CHECK(e.error == ECONNRESET);
    free(e.answer);
    close(ends[0]);
}

int main(void) {
    int32_t hot[ROWS];
    goes_on = go_on;
    for (int i = 0; i < ROWS; i++) hot[i] = i % 3 ? -1 : i;
    for (u64 servers = 1; servers <= 7; servers++)
        for (u64 count = 0; count <= MOST; count += 25)
            for (u64 turn = 0; turn < 5; turn++) {
                routes(servers, count, turn * 13, hot);
                routes(servers, count, turn, NULL);
            }
    places_and_counts();
    gathers();
    answers();
    rows_in_pieces();
    puts("rows: fine");
    return 0;
}
