/* The serving thread, the life of an engine, and what other threads ask of it. */
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}


/* A thread that wants the lock gets it before the serving thread takes it again. */
void enter(Engine *e) {
    atomic_fetch_add(&e->wanted, 1);
    pthread_mutex_lock(&e->lock);
    atomic_fetch_sub(&e->wanted, 1);
}
void leave(Engine *e) { pthread_mutex_unlock(&e->lock); }

void wake(Engine *e) {
    ssize_t n = write(e->wake[1], "", 1);
    (void)n; /* full: it will wake up anyway */
}

/* ---------------------------------------------------------------- operations */

static void append(Engine *e, Op *op) {
    op->prev = e->last_op;
    op->next = NULL;
    if (e->last_op) e->last_op->next = op;
    else e->ops = op;
    e->last_op = op;
}

void finish(Engine *e, Op *op, int outcome) {
    if (op->prev) op->prev->next = op->next;
    else e->ops = op->next;
    if (op->next) op->next->prev = op->prev;
    else e->last_op = op->prev;
    op->state = outcome;
    pthread_cond_broadcast(&e->changed);
}
/* ---------------------------------------------------------------- the serving thread */

static int watch(Engine *e) {
    int count = 0;
    e->polled[count] = (struct pollfd){.fd = e->wake[0], .events = POLLIN};
    e->polled_stream[count++] = -1;
    for (int peer = 0; peer < e->size; peer++) {
        Peer *p = &e->peers[peer];
        if (p->is_lost || !p->streams) continue;
        int fragments = has_fragment(e, peer);
        for (int i = 0; i < p->streams; i++) {
            Stream *s = &p->stream[i];
            if (s->ended) continue;
            short events = i == 0 && p->kept_bytes > KEPT_BYTES ? 0 : POLLIN;
            if (s->out || (fragments && carries_data(p, i))) events |= POLLOUT;
            e->polled[count] = (struct pollfd){.fd = s->fd, .events = events};
            e->polled_stream[count++] = peer * MAX_STREAMS + i;
        }
    }
    return count;
}

static int pause_ms(const Engine *e) {
    if (e->closing) return 2;
    for (int peer = 0; peer < e->size; peer++)
        if (e->peers[peer].deadline_ns && !e->peers[peer].is_lost) return 20;
    return 10000;
}

static void attend(Engine *e, int index) {
    short events = e->polled[index].revents;
    int where = e->polled_stream[index];
    if (!events) return;
    if (where < 0) {
        u8 drained[256];
        while (read(e->wake[0], drained, sizeof drained) == sizeof drained) {}
        return;
    }
    int peer = where / MAX_STREAMS, number = where % MAX_STREAMS;
    if (e->peers[peer].is_lost) return;
    if (events & (POLLIN | POLLHUP | POLLERR)) read_stream(e, peer, number);
    if (events & POLLOUT && !e->peers[peer].is_lost) write_stream(e, peer, number);
}

static void *serve(void *given) {
    Engine *e = given;
    pthread_mutex_lock(&e->lock);
    while (!e->closing || !may_close(e)) {
        int count = watch(e), ms = pause_ms(e);
        pthread_mutex_unlock(&e->lock);
        poll(e->polled, (nfds_t)count, ms);
        for (int i = 0; i < 100 && atomic_load(&e->wanted); i++) sched_yield();
        pthread_mutex_lock(&e->lock);
        for (int i = 0; i < count; i++) attend(e, i);
        check_ends(e);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* ---------------------------------------------------------------- the life of an engine */

Engine *create(int rank, int size) {
    Engine *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->rank = rank;
    e->size = size;
    e->room = size * MAX_STREAMS + 1;
    e->peers = calloc((size_t)size, sizeof *e->peers);
    e->polled = calloc((size_t)e->room, sizeof *e->polled);
    e->polled_stream = calloc((size_t)e->room, sizeof *e->polled_stream);
    pthread_mutex_init(&e->lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&e->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    e->wake[0] = e->wake[1] = -1;
    sigset_t all, before;
    sigfillset(&all);
    if (e->peers && e->polled && e->polled_stream && !pipe2(e->wake, O_NONBLOCK | O_CLOEXEC)) {
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's threads */
        int failed = pthread_create(&e->thread, NULL, serve, e);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!failed) return e;
        close(e->wake[0]);
        close(e->wake[1]);
    }
    free(e->peers);
    free(e->polled);
    free(e->polled_stream);
    free(e);
    return NULL;
}

int add_peer(Engine *e, int peer, const int *fds, int count) {
    Peer *p = &e->peers[peer];
    int fine = 1;
    u8 *scratch[MAX_STREAMS] = {0};
    for (int i = 0; i < count && fine; i++) fine = (scratch[i] = malloc(SCRATCH_BYTES)) != NULL;
    enter(e);
    fine = fine && !p->streams && !e->closing;
    for (int i = 0; i < count && fine; i++)
        p->stream[i] = (Stream){.fd = fds[i], .scratch = scratch[i]};
    if (fine) p->streams = count;
    e->connected += fine;
    leave(e);
    wake(e);
    for (int i = 0; i < count && !fine; i++) free(scratch[i]);
    return fine;
}

/* Every operation fails; what was sent before still arrives. The second call does nothing. */
void stop(Engine *e) {
    enter(e);
    if (e->closing) {
        leave(e);
        return;
    }
    e->closing = 1;
    e->close_ns = now_ns() + GRACE_NS;
    for (Op *op = e->ops, *next; op; op = next) {
        next = op->next;
        give_up(e, op, CLOSED, WHY_ENDED);
    }
    leave(e);
    wake(e);
    pthread_join(e->thread, NULL);
    for (int peer = 0; peer < e->size; peer++) {
        Peer *p = &e->peers[peer];
        if (p->streams && !p->is_lost) lose(e, peer);
        while (p->messages) remove_message(e, p, p->messages);
    }
    close(e->wake[0]);
    close(e->wake[1]);
}

void destroy(Engine *e) {
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->changed);
    free(e->peers);
    free(e->polled);
    free(e->polled_stream);
    free(e->aborted);
    free(e);
}

static void start_send(Engine *e, Op *op) {
    Peer *p = &e->peers[op->peer];
    int is_eager = op->bytes <= EAGER_BYTES;
    op->message = p->next_message++;
    Frame *f = new_frame(is_eager ? EAGER : RTS, op->space, op->tag, op->message, op->bytes);
    if (!f) {
        give_up(e, op, LOST, ENOMEM);
        return;
    }
    f->head.descriptor_bytes = op->descriptor_bytes;
    memcpy(f->head.descriptor, op->descriptor, op->descriptor_bytes);
    if (is_eager) {
        f->data = op->data;
        f->bytes = op->bytes;
        f->op = op;
    }
    op->phase = is_eager ? QUEUED : ANNOUNCED;
    say(e, op->peer, f);
}

static void start_receive(Engine *e, Op *op) {
    op->phase = POSTED;
    int first = op->peer < 0 ? 0 : op->peer, last = op->peer < 0 ? e->size - 1 : op->peer;
    int left = 0;
    for (int peer = first; peer <= last; peer++) {
        Message *m = unmatched(&e->peers[peer], op);
        if (m) {
            match(e, peer, m, op);
            return;
        }
        left += e->peers[peer].streams && !e->peers[peer].is_lost && !is_aborted(e, peer, op->space);
    }
    if (left) return;
    op->source = op->peer;
    give_up(e, op, LOST, e->peers[first].why);
}

/* Whether this receive from any source would end at once: with a message, or as there is no peer. */
int has_any(Engine *e, const Op *op) {
    int left = 0, found = 0;
    enter(e);
    for (int peer = 0; peer < e->size && !found; peer++) {
        found = unmatched(&e->peers[peer], op) != NULL;
        left += e->peers[peer].streams && !e->peers[peer].is_lost && !is_aborted(e, peer, op->space);
    }
    found |= !left || e->closing || is_aborted(e, e->rank, op->space);
    leave(e);
    return found;
}

void post(Engine *e, Op *op) {
    enter(e);
    op->state = -1;
    op->source = op->peer;
    append(e, op);
    if (!op->is_send) {
        op->at = e->asked_bytes;
        e->asked_bytes += op->bytes;
    }
    if (e->closing || is_aborted(e, e->rank, op->space)) give_up(e, op, CLOSED, WHY_ENDED);
    else if (!op->is_send) start_receive(e, op);
    else if (e->peers[op->peer].is_lost || !e->peers[op->peer].streams
             || is_aborted(e, op->peer, op->space))
        give_up(e, op, LOST, e->peers[op->peer].why);
    else start_send(e, op);
    leave(e);
}

/* The outcome, or -1 if it is not there within this time. */
int wait_for(Engine *e, Op *op, u64 ns) {
    u64 until = now_ns() + ns;
    struct timespec limit = {(time_t)(until / 1000000000ull), (long)(until % 1000000000ull)};
    enter(e);
    while (op->state < 0)
        if (pthread_cond_timedwait(&e->changed, &e->lock, &limit)) break;
    int state = op->state;
    leave(e);
    return state;
}

int state_of(Engine *e, const Op *op) {
    enter(e);
    int state = op->state;
    leave(e);
    return state;
}

/* Free an operation; one that is under way is given up. */
void forget(Engine *e, Op *op) {
    enter(e);
    if (op->state < 0) give_up(e, op, CLOSED, WHY_ENDED);
    leave(e);
    free(op);
}

/* The end of a wait whose time is over: the outcome, LATE where there was none. */
int expire(Engine *e, Op *op) {
    enter(e);
    if (op->state < 0) {
        give_up(e, op, LATE, WHY_ENDED);
        grant(e);
    }
    int state = op->state;
    leave(e);
    return state;
}

/* This rank leaves the group of a space, and says so to its peers. */
void leave_space(Engine *e, u32 space) {
    enter(e);
    if (!e->closing && !is_aborted(e, e->rank, space)) {
        fail_space(e, e->rank, space);
        for (int peer = 0; peer < e->size; peer++)
            if (e->peers[peer].streams) say(e, peer, new_frame(ABORT, space, 0, 0, 0));
    }
    leave(e);
}
