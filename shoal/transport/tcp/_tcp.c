/* Messages between ranks over TCP, without the GIL: one thread moves the bytes of all connections.
 *
 * A pair of ranks has several connections (streams) that both sides have authenticated before:
 *
 *   stream 0        small messages whole (EAGER); of large ones what is said about them
 *   streams 1, 2 …  fragments of large messages (DATA); a free stream takes the next fragment
 *
 *   sender                                   receiver
 *   RTS  message 7, tag, bytes, descriptor ->   matched with the first receive of that tag
 *                                         <-    CTS message 7: there is memory for it
 *   DATA message 7, offset, bytes         ->    from the socket into the tensor, or added to it
 *
 * So a large message never lies in memory of its own: it is sent from the sender's tensor and
 * received into the receiver's. Where it is to be added, each piece is added while it is in the
 * cache and the next one is on the wire. A small message that came before its receive is kept.
 *
 * Every length of a frame is checked before it is used; a frame that does not fit ends the
 * connection. No torch here.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

#include "../arithmetic.h"

#ifdef __linux__
#include <linux/sockios.h>
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

#define MAGIC 0x31706374u
#define MAX_STREAMS 16
#define MAX_DESCRIPTOR 80
#define EAGER_BYTES 32768u
#define FRAGMENT_BYTES (256u << 10)
#define SCRATCH_BYTES (128u << 10)
#define KEPT_BYTES (256ull << 20) /* of small messages that no receive has asked for, per peer */
#define READS_PER_TURN 4
#define GRACE_NS 1000000000ull /* from the end of one stream to the loss of the peer */
#define SLICE_NS 100000000ull
#define COPY (-1)

enum { EAGER = 1, RTS, CTS, REFUSED, DATA, ABORT, DROPPED };
enum { FINE, LOST, LATE, MISMATCH, CLOSED };
enum { POSTED, MATCHED, QUEUED, ANNOUNCED, READY }; /* receives: the first two; sends: the others */
enum { WHY_ENDED = 0, WHY_FRAME = -1 };             /* or an errno */

typedef struct { /* as it is on the wire; all of our machines are little-endian */
    u32 magic, kind, space, descriptor_bytes;
    u64 tag, message, bytes, offset;
    u8 descriptor[MAX_DESCRIPTOR];
} Head;

typedef struct Op Op;
struct Op {
    Op *prev, *next;
    int is_send, peer, source, phase, state, why; /* state: -1 under way, or an outcome */
    int dtype, operator;
    u32 space, descriptor_bytes;
    u64 tag, message, bytes, handed; /* handed: bytes that streams have taken */
    u64 sent;
    u8 *data;
    u8 descriptor[MAX_DESCRIPTOR];
};

typedef struct Frame Frame;
struct Frame {
    Frame *next;
    Head head;
    const u8 *data;
    u64 bytes, sent; /* sent counts the head, too */
    Op *op;          /* whose memory `data` is */
    u8 *own;
};

typedef struct Message Message;
struct Message { /* that comes */
    Message *next;
    Head head;
    Op *op;
    u8 *kept;
    u64 got;
    int dropped;
};

typedef struct {
    int fd, ended;
    Frame *out, *last;
    Head head;
    u32 head_got, fill;
    u64 left, at; /* of the payload that comes: bytes, and where in the message */
    Message *message;
    u8 *scratch;
} Stream;

typedef struct {
    Stream stream[MAX_STREAMS];
    int streams, is_lost, why;
    u64 next_message, deadline_ns, kept_bytes;
    Message *messages, *last;
} Peer;

typedef struct {
    int rank, size, wake[2];
    Peer *peers;
    Op *ops, *last_op;
    u32 *aborted; /* pairs (peer, space) */
    u64 aborts;
    u64 close_ns;
    int closing;
    _Atomic int wanted;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    struct pollfd *polled;
    int *polled_stream; /* peer * MAX_STREAMS + stream */
    int room;
} Engine;

static u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

static u64 least(u64 a, u64 b) { return a < b ? a : b; }

/* A thread that wants the lock gets it before the serving thread takes it again. */
static void enter(Engine *e) {
    atomic_fetch_add(&e->wanted, 1);
    pthread_mutex_lock(&e->lock);
    atomic_fetch_sub(&e->wanted, 1);
}
static void leave(Engine *e) { pthread_mutex_unlock(&e->lock); }

static void wake(Engine *e) {
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

static void finish(Engine *e, Op *op, int outcome) {
    if (op->prev) op->prev->next = op->next;
    else e->ops = op->next;
    if (op->next) op->next->prev = op->prev;
    else e->last_op = op->prev;
    op->state = outcome;
    pthread_cond_broadcast(&e->changed);
}

static void store(const Op *op, u64 offset, const u8 *data, u64 bytes) {
    u8 *into = op->data + offset;
    if (op->operator == COPY) {
        memcpy(into, data, bytes);
        return;
    }
    u64 size = ELEMENT_BYTES[op->dtype], n = bytes / size, step = CHUNK / (size < 4 ? 4 : size);
    for (u64 i = 0; i < n; i += step) {
        const u8 *in[2] = {into + i * size, data + i * size};
        combine_block(op->dtype, op->operator, into + i * size, in, 2, least(step, n - i));
    }
}

/* ---------------------------------------------------------------- sending */

static void free_frame(Frame *f) {
    free(f->own);
    free(f);
}

static Frame *new_frame(u32 kind, u32 space, u64 tag, u64 message, u64 bytes) {
    Frame *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->head.magic = MAGIC;
    f->head.kind = kind;
    f->head.space = space;
    f->head.tag = tag;
    f->head.message = message;
    f->head.bytes = bytes;
    return f;
}

/* The next fragment of the first large message that has one for this peer. */
static Frame *next_fragment(Engine *e, int peer) {
    for (Op *op = e->ops; op; op = op->next) {
        if (!op->is_send || op->peer != peer || op->phase != READY || op->handed == op->bytes) continue;
        u64 bytes = least(op->bytes - op->handed, FRAGMENT_BYTES);
        Frame *f = new_frame(DATA, op->space, op->tag, op->message, bytes);
        if (!f) return NULL;
        f->head.offset = op->handed;
        f->data = op->data + op->handed;
        f->bytes = bytes;
        f->op = op;
        op->handed += bytes;
        return f;
    }
    return NULL;
}

static int has_fragment(const Engine *e, int peer) {
    for (const Op *op = e->ops; op; op = op->next)
        if (op->is_send && op->peer == peer && op->phase == READY && op->handed < op->bytes) return 1;
    return 0;
}

static void stream_ended(Peer *p, Stream *s, int why) {
    if (s->ended) return;
    s->ended = 1;
    if (!p->deadline_ns) {
        p->deadline_ns = now_ns() + (why == WHY_FRAME ? 0 : GRACE_NS);
        p->why = why;
    }
}

static void frame_sent(Engine *e, Stream *s) {
    Frame *f = s->out;
    Op *op = f->op;
    s->out = f->next;
    if (!s->out) s->last = NULL;
    if (op) {
        op->sent += f->bytes;
        if (op->phase != ANNOUNCED && op->sent == op->bytes) finish(e, op, FINE);
    }
    free_frame(f);
}

static int carries_data(const Peer *p, int number) { return number > 0 || p->streams == 1; }

static void write_stream(Engine *e, int peer, int number) {
    Peer *p = &e->peers[peer];
    Stream *s = &p->stream[number];
    while (!s->ended) {
        if (!s->out && carries_data(p, number) && !e->closing) s->out = s->last = next_fragment(e, peer);
        Frame *f = s->out;
        if (!f) return;
        struct iovec parts[2];
        int count = 0;
        u64 head = sizeof(Head);
        if (f->sent < head) parts[count++] = (struct iovec){(u8 *)&f->head + f->sent, head - f->sent};
        u64 at = f->sent > head ? f->sent - head : 0;
        if (at < f->bytes) parts[count++] = (struct iovec){(void *)(f->data + at), f->bytes - at};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t n = sendmsg(s->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                stream_ended(p, s, errno);
                wake(e);
            }
            return;
        }
        f->sent += (u64)n;
        if (f->sent < head + f->bytes) return;
        frame_sent(e, s);
    }
}

static void write_all(Engine *e, int peer) {
    for (int i = 0; i < e->peers[peer].streams; i++) write_stream(e, peer, i);
}

static void say(Engine *e, int peer, Frame *f) {
    Stream *s = &e->peers[peer].stream[0];
    if (!f) return;
    if (e->peers[peer].is_lost || !e->peers[peer].streams) {
        free_frame(f);
        return;
    }
    if (s->last) s->last->next = f;
    else s->out = f;
    s->last = f;
    if (s->out == f) write_stream(e, peer, 0);
    if (s->out) wake(e);
}

/* ---------------------------------------------------------------- receiving */

static void remove_message(Peer *p, Message *m) {
    Message **at = &p->messages, *before = NULL;
    while (*at && *at != m) {
        before = *at;
        at = &(*at)->next;
    }
    if (*at) *at = m->next;
    if (p->last == m) p->last = before;
    if (m->kept) p->kept_bytes -= m->head.bytes;
    free(m->kept);
    free(m);
}

static int is_whole(const Message *m) { return m->got == m->head.bytes; }

static void message_done(Engine *e, Peer *p, Message *m) {
    if (m->op) {
        if (m->kept) store(m->op, 0, m->kept, m->head.bytes);
        finish(e, m->op, FINE);
    }
    remove_message(p, m);
}

static int fits(const Op *op, const Message *m) {
    return op->bytes == m->head.bytes && op->descriptor_bytes == m->head.descriptor_bytes
           && !memcmp(op->descriptor, m->head.descriptor, op->descriptor_bytes);
}

/* A receive and a message have met. */
static void match(Engine *e, int peer, Message *m, Op *op) {
    op->source = peer;
    op->phase = MATCHED;
    if (!fits(op, m)) {
        op->descriptor_bytes = m->head.descriptor_bytes;
        memcpy(op->descriptor, m->head.descriptor, MAX_DESCRIPTOR);
        finish(e, op, MISMATCH);
        m->dropped = 1;
        if (m->head.kind == RTS) say(e, peer, new_frame(REFUSED, 0, 0, m->head.message, 0));
        if (m->head.kind == RTS || is_whole(m)) remove_message(&e->peers[peer], m);
        return;
    }
    m->op = op;
    if (m->head.kind == RTS) say(e, peer, new_frame(CTS, 0, 0, m->head.message, 0));
    else if (is_whole(m)) message_done(e, &e->peers[peer], m);
}

static Op *receive_for(const Engine *e, int peer, const Head *h) {
    for (Op *op = e->ops; op; op = op->next)
        if (!op->is_send && op->phase == POSTED && (op->peer == peer || op->peer < 0)
            && op->space == h->space && op->tag == h->tag)
            return op;
    return NULL;
}

static Message *unmatched(const Peer *p, const Op *op) {
    for (Message *m = p->messages; m; m = m->next)
        if (!m->op && !m->dropped && m->head.space == op->space && m->head.tag == op->tag) return m;
    return NULL;
}

/* EAGER or RTS; NULL if there is no memory. */
static Message *announced(Engine *e, int peer, const Head *h) {
    Peer *p = &e->peers[peer];
    Message *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->head = *h;
    Op *op = receive_for(e, peer, h);
    int is_direct = op && fits(op, m);
    if (h->kind == EAGER && h->bytes && !is_direct) {
        m->kept = malloc(h->bytes);
        if (!m->kept) {
            free(m);
            return NULL;
        }
        p->kept_bytes += h->bytes;
    }
    if (p->last) p->last->next = m;
    else p->messages = m;
    p->last = m;
    if (h->kind == EAGER && h->bytes) {
        if (is_direct) {
            op->source = peer;
            op->phase = MATCHED;
            m->op = op;
        } else if (op) {
            match(e, peer, m, op);
        }
        return m;
    }
    if (h->kind == RTS) m->got = 0;
    if (op) match(e, peer, m, op);
    return m;
}

static Message *message_numbered(const Peer *p, u64 number) {
    for (Message *m = p->messages; m; m = m->next)
        if (m->head.kind == RTS && m->head.message == number) return m;
    return NULL;
}

static Op *send_numbered(const Engine *e, int peer, u64 number) {
    for (Op *op = e->ops; op; op = op->next)
        if (op->is_send && op->peer == peer && op->phase == ANNOUNCED && op->message == number) return op;
    return NULL;
}

static void fail_space(Engine *e, int peer, u32 space);

/* A stream may be in the middle of it, so it stays until the peer is lost. */
static void drop_message(Engine *e, int peer, Message *m) {
    Op *op = m->op;
    m->op = NULL;
    m->dropped = 1;
    if (!op) return;
    op->source = peer;
    finish(e, op, LOST);
}

/* 0 if the frame makes no sense */
static int take_head(Engine *e, int peer, int number) {
    Peer *p = &e->peers[peer];
    Stream *s = &p->stream[number];
    const Head *h = &s->head;
    s->left = 0;
    s->message = NULL;
    if (h->magic != MAGIC || h->descriptor_bytes > MAX_DESCRIPTOR) return 0;
    if (number && h->kind != DATA) return 0;
    switch (h->kind) {
        case EAGER: {
            if (h->bytes > EAGER_BYTES) return 0;
            if (e->closing) break;
            Message *m = announced(e, peer, h);
            if (!m) return 0;
            if (h->bytes) s->message = m; /* one without bytes may be gone already */
            s->at = 0;
            break;
        }
        case RTS:
            if (h->bytes <= EAGER_BYTES || (!e->closing && !announced(e, peer, h))) return 0;
            return 1;
        case CTS: {
            Op *op = send_numbered(e, peer, h->message);
            if (op) {
                op->phase = READY;
                write_all(e, peer);
            }
            return 1;
        }
        case REFUSED: {
            Op *op = send_numbered(e, peer, h->message);
            if (op) finish(e, op, FINE); /* the receiver tells of it */
            return 1;
        }
        case DROPPED: { /* the sender has given the message up */
            Message *m = message_numbered(p, h->message);
            if (m) drop_message(e, peer, m);
            return 1;
        }
        case ABORT: fail_space(e, peer, h->space); return 1;
        case DATA: {
            Message *m = message_numbered(p, h->message);
            if (!h->bytes || h->bytes > FRAGMENT_BYTES) return 0;
            if (m && (h->offset > m->head.bytes || h->bytes > m->head.bytes - h->offset)) return 0;
            if (m && m->op && h->offset % 64) return 0;
            s->message = m; /* NULL: of an operation that was given up */
            s->at = h->offset;
            break;
        }
        default: return 0;
    }
    s->left = h->bytes;
    s->fill = 0;
    return 1;
}

/* Bytes that were read, 0 if there are none now, -1 at the end of the stream. */
static ssize_t read_some(Peer *p, Stream *s, u8 *into, u64 bytes) {
    for (;;) {
        ssize_t n = recv(s->fd, into, bytes, MSG_DONTWAIT);
        if (n > 0) return n;
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        stream_ended(p, s, n < 0 ? errno : WHY_ENDED);
        return -1;
    }
}

static ssize_t read_payload(Engine *e, Peer *p, Stream *s) {
    (void)e;
    Message *m = s->message;
    Op *op = m && !m->dropped ? m->op : NULL;
    u8 *kept = m ? m->kept : NULL;
    ssize_t n;
    if (kept || (op && op->operator == COPY)) {
        n = read_some(p, s, (kept ? kept : op->data) + s->at, s->left);
    } else {
        n = read_some(p, s, s->scratch + s->fill, least(s->left, SCRATCH_BYTES - s->fill));
        if (n > 0 && op) {
            u64 size = ELEMENT_BYTES[op->dtype], have = s->fill + (u64)n, whole = have / size * size;
            store(op, s->at - s->fill, s->scratch, whole);
            memmove(s->scratch, s->scratch + whole, have - whole);
            s->fill = (u32)(have - whole);
        }
    }
    if (n > 0) {
        s->at += (u64)n;
        s->left -= (u64)n;
        if (m) m->got += (u64)n;
    }
    return n;
}

static void read_stream(Engine *e, int peer, int number) {
    Peer *p = &e->peers[peer];
    Stream *s = &p->stream[number];
    for (int turn = 0; turn < READS_PER_TURN && !s->ended; turn++) {
        if (s->left) {
            if (read_payload(e, p, s) <= 0) return;
            Message *m = s->message;
            if (s->left) continue;
            s->head_got = 0;
            s->message = NULL;
            if (!m || !is_whole(m)) continue;
            if (m->op || m->dropped) message_done(e, p, m);
            continue;
        }
        ssize_t n = read_some(p, s, (u8 *)&s->head + s->head_got, sizeof(Head) - s->head_got);
        if (n <= 0) return;
        s->head_got += (u32)n;
        if (s->head_got < sizeof(Head)) continue;
        if (!take_head(e, peer, number)) {
            stream_ended(p, s, WHY_FRAME);
            p->why = WHY_FRAME;
            p->deadline_ns = 1;
            return;
        }
        if (!s->left) s->head_got = 0;
    }
}

/* ---------------------------------------------------------------- ends */

/* No stream uses the memory of this operation any more. */
static void detach(Engine *e, Op *op) {
    for (int peer = 0; peer < e->size; peer++) {
        Peer *p = &e->peers[peer];
        for (Message *m = p->messages, *next; m; m = next) {
            next = m->next;
            if (m->op != op) continue;
            m->op = NULL;
            m->dropped = 1;
        }
        for (int i = 0; i < p->streams; i++) {
            Frame **at = &p->stream[i].out, *before = NULL;
            while (*at) {
                Frame *f = *at;
                if (f->op != op) {
                    before = f;
                    at = &f->next;
                } else if (!f->sent) { /* nothing of it is on the wire */
                    *at = f->next;
                    if (p->stream[i].last == f) p->stream[i].last = before;
                    free_frame(f);
                } else { /* the rest of the frame goes out from a copy */
                    f->own = f->bytes ? malloc(f->bytes) : NULL;
                    if (f->own) memcpy(f->own, f->data, f->bytes);
                    else if (f->bytes) stream_ended(p, &p->stream[i], ENOMEM);
                    f->data = f->own;
                    f->op = NULL;
                    before = f;
                    at = &f->next;
                }
            }
        }
    }
}

static void give_up(Engine *e, Op *op, int outcome, int why) {
    detach(e, op);
    if (op->is_send && (op->phase == ANNOUNCED || op->phase == READY))
        say(e, op->peer, new_frame(DROPPED, 0, 0, op->message, 0));
    op->why = why;
    finish(e, op, outcome);
}

static void lose(Engine *e, int peer) {
    Peer *p = &e->peers[peer];
    p->is_lost = 1;
    p->deadline_ns = 0;
    for (Op *op = e->ops, *next; op; op = next) {
        next = op->next;
        int is_of = op->is_send || op->phase == POSTED ? op->peer == peer : op->source == peer;
        if (!is_of) continue;
        op->source = peer;
        give_up(e, op, LOST, p->why);
    }
    for (int i = 0; i < p->streams; i++) {
        Stream *s = &p->stream[i];
        for (Frame *f = s->out, *next; f; f = next) {
            next = f->next;
            free_frame(f);
        }
        free(s->scratch);
        close(s->fd);
        *s = (Stream){.fd = -1, .ended = 1};
    }
    for (Message *m = p->messages, *next; m; m = next) {
        next = m->next;
        if (m->head.kind == RTS || !is_whole(m)) remove_message(p, m);
    }
    int left = 0;
    for (int i = 0; i < e->size; i++) left += e->peers[i].streams && !e->peers[i].is_lost;
    if (left) return;
    for (Op *op = e->ops, *next; op; op = next) { /* receives from any source */
        next = op->next;
        op->source = peer;
        give_up(e, op, LOST, p->why);
    }
}

static int is_aborted(const Engine *e, int peer, u32 space) {
    for (u64 i = 0; i < e->aborts; i++)
        if (e->aborted[2 * i] == (u32)peer && e->aborted[2 * i + 1] == space) return 1;
    return 0;
}

/* The peer has left the group of this space; with the own rank for a peer: this rank has.
 * What a peer had sent before still arrives: for what it gave up it says DROPPED. */
static void fail_space(Engine *e, int peer, u32 space) {
    int own = peer == e->rank;
    u32 *more = realloc(e->aborted, (e->aborts + 1) * 2 * sizeof(u32));
    if (more) {
        e->aborted = more;
        e->aborted[2 * e->aborts] = (u32)peer;
        e->aborted[2 * e->aborts++ + 1] = space;
    }
    for (Op *op = e->ops, *next; op; op = next) {
        next = op->next;
        int whose = op->phase == MATCHED ? op->source : op->peer;
        if (op->space != space || (!own && (whose != peer || op->phase == MATCHED))) continue;
        if (!own && op->phase == READY) continue; /* it has asked for it */
        if (!own) op->source = peer;
        give_up(e, op, own ? CLOSED : LOST, WHY_ENDED);
    }
}

static void check_ends(Engine *e) {
    u64 now = 0;
    for (int peer = 0; peer < e->size; peer++) {
        Peer *p = &e->peers[peer];
        if (!p->deadline_ns || p->is_lost) continue;
        int all = 1;
        for (int i = 0; i < p->streams; i++) all &= p->stream[i].ended;
        if (!now) now = now_ns();
        if (all || now >= p->deadline_ns) lose(e, peer);
    }
}

static int unsent(const Stream *s) {
    int bytes = 0;
    if (s->ended) return 0;
    if (s->out) return 1;
#ifdef SIOCOUTQ
    if (ioctl(s->fd, SIOCOUTQ, &bytes) < 0) return 0;
#endif
    return bytes;
}

/* Whether everything that was sent has arrived, or it has taken too long. */
static int may_close(Engine *e) {
    int waiting = 0;
    for (int peer = 0; peer < e->size; peer++)
        for (int i = 0; i < e->peers[peer].streams; i++) {
            Stream *s = &e->peers[peer].stream[i];
            if (!s->ended && !s->out && s->fd >= 0) shutdown(s->fd, SHUT_WR);
            waiting |= unsent(s) != 0;
        }
    return !waiting || now_ns() > e->close_ns;
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

static Engine *create(int rank, int size) {
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

static int add_peer(Engine *e, int peer, const int *fds, int count) {
    Peer *p = &e->peers[peer];
    int fine = !p->streams;
    u8 *scratch[MAX_STREAMS] = {0};
    for (int i = 0; i < count && fine; i++) fine = (scratch[i] = malloc(SCRATCH_BYTES)) != NULL;
    if (!fine) {
        for (int i = 0; i < count; i++) free(scratch[i]);
        return 0;
    }
    enter(e);
    for (int i = 0; i < count; i++) p->stream[i] = (Stream){.fd = fds[i], .scratch = scratch[i]};
    p->streams = count;
    leave(e);
    wake(e);
    return 1;
}

/* Every operation fails; what was sent before still arrives. */
static void stop(Engine *e) {
    enter(e);
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
        while (p->messages) remove_message(p, p->messages);
    }
    close(e->wake[0]);
    close(e->wake[1]);
}

static void destroy(Engine *e) {
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

static void post(Engine *e, Op *op) {
    enter(e);
    op->state = -1;
    op->source = op->peer;
    append(e, op);
    if (e->closing || is_aborted(e, e->rank, op->space)) give_up(e, op, CLOSED, WHY_ENDED);
    else if (!op->is_send) start_receive(e, op);
    else if (e->peers[op->peer].is_lost || !e->peers[op->peer].streams
             || is_aborted(e, op->peer, op->space))
        give_up(e, op, LOST, e->peers[op->peer].why);
    else start_send(e, op);
    leave(e);
}

/* The outcome, or -1 if it is not there within this time. */
static int wait_for(Engine *e, Op *op, u64 ns) {
    u64 until = now_ns() + ns;
    struct timespec limit = {(time_t)(until / 1000000000ull), (long)(until % 1000000000ull)};
    enter(e);
    while (op->state < 0)
        if (pthread_cond_timedwait(&e->changed, &e->lock, &limit)) break;
    int state = op->state;
    leave(e);
    return state;
}

/* ---------------------------------------------------------------- Python */

#define NAME "shoal.transport.tcp.engine"

static void abandon(PyObject *capsule) {
    Engine *e = PyCapsule_IsValid(capsule, NAME) ? PyCapsule_GetPointer(capsule, NAME) : NULL;
    if (!e) return;
    if (!e->closing) stop(e);
    destroy(e);
}

static Engine *engine_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, NAME); }

static PyObject *py_create(PyObject *self, PyObject *args) {
    (void)self;
    int rank, size;
    if (!PyArg_ParseTuple(args, "ii", &rank, &size)) return NULL;
    if (size < 1 || size > 1 << 16 || rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "rank %d of %d", rank, size);
    Engine *e = create(rank, size);
    return e ? PyCapsule_New(e, NAME, abandon) : PyErr_NoMemory();
}

static PyObject *py_add_peer(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *numbers;
    int peer, fds[MAX_STREAMS];
    if (!PyArg_ParseTuple(args, "OiO!", &capsule, &peer, &PyTuple_Type, &numbers)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(numbers);
    if (peer < 0 || peer >= e->size || peer == e->rank || count < 1 || count > MAX_STREAMS)
        return PyErr_Format(PyExc_ValueError, "%zd streams to rank %d of %d", count, peer, e->size);
    for (Py_ssize_t i = 0; i < count; i++) fds[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(numbers, i));
    if (PyErr_Occurred()) return NULL;
    if (!add_peer(e, peer, fds, (int)count))
        return PyErr_Format(PyExc_ValueError, "rank %d has its streams already, or no memory", peer);
    Py_RETURN_NONE;
}

static PyObject *py_post(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    int is_send, peer, dtype, operator;
    unsigned long long data, bytes, tag;
    unsigned int space;
    const char *descriptor;
    Py_ssize_t descriptor_bytes;
    if (!PyArg_ParseTuple(args, "OiKKiIKy#ii", &capsule, &is_send, &data, &bytes, &peer, &space, &tag,
                          &descriptor, &descriptor_bytes, &dtype, &operator))
        return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    if (peer >= e->size || peer == e->rank || (peer < 0 && is_send))
        return PyErr_Format(PyExc_ValueError, "rank %d has no connection to rank %d", e->rank, peer);
    if (descriptor_bytes > MAX_DESCRIPTOR || dtype < U8 || dtype > F64 || operator > XOR)
        return PyErr_Format(PyExc_ValueError, "this tensor cannot be sent");
    Op *op = calloc(1, sizeof *op);
    if (!op) return PyErr_NoMemory();
    op->is_send = is_send;
    op->data = (u8 *)(uintptr_t)data;
    op->bytes = bytes;
    op->peer = peer < 0 ? -1 : peer;
    op->space = space;
    op->tag = tag;
    op->dtype = dtype;
    op->operator = operator < 0 ? COPY : operator;
    op->descriptor_bytes = (u32)descriptor_bytes;
    memcpy(op->descriptor, descriptor, (size_t)descriptor_bytes);
    Py_BEGIN_ALLOW_THREADS
    post(e, op);
    Py_END_ALLOW_THREADS
    return PyLong_FromVoidPtr(op);
}

static PyObject *py_state(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *number;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &number)) return NULL;
    Engine *e = engine_of(capsule);
    Op *op = PyLong_AsVoidPtr(number);
    if (!e || !op) return NULL;
    enter(e);
    int state = op->state;
    leave(e);
    return PyLong_FromLong(state);
}

/* (outcome, the other rank, why it was lost, its descriptor); LATE: the operation is given up */
static PyObject *py_wait(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *number;
    unsigned long long timeout_ns;
    if (!PyArg_ParseTuple(args, "OOK", &capsule, &number, &timeout_ns)) return NULL;
    Engine *e = engine_of(capsule);
    Op *op = PyLong_AsVoidPtr(number);
    if (!e || !op) return NULL;
    u64 until = now_ns() + timeout_ns;
    int state = op->state < 0 ? -1 : wait_for(e, op, 0);
    while (state < 0) {
        u64 now = now_ns();
        if (now >= until) {
            enter(e);
            if (op->state < 0) give_up(e, op, LATE, WHY_ENDED);
            state = op->state;
            leave(e);
            break;
        }
        Py_BEGIN_ALLOW_THREADS
        state = wait_for(e, op, least(SLICE_NS, until - now));
        Py_END_ALLOW_THREADS
        if (state < 0 && PyErr_CheckSignals()) return NULL;
    }
    return Py_BuildValue("iiiy#", state, op->source, op->why, op->descriptor,
                         (Py_ssize_t)op->descriptor_bytes);
}

/* Free an operation; one that is under way is given up. */
static PyObject *py_forget(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule, *number;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &number)) return NULL;
    Engine *e = engine_of(capsule);
    Op *op = PyLong_AsVoidPtr(number);
    if (!e || !op) return NULL;
    enter(e);
    if (op->state < 0) give_up(e, op, CLOSED, WHY_ENDED);
    leave(e);
    free(op);
    Py_RETURN_NONE;
}

/* This rank leaves the group of a space; the peers are told. */
static PyObject *py_abort(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    unsigned int space;
    if (!PyArg_ParseTuple(args, "OI", &capsule, &space)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    enter(e);
    if (!e->closing && !is_aborted(e, e->rank, space)) {
        fail_space(e, e->rank, space);
        for (int peer = 0; peer < e->size; peer++)
            if (e->peers[peer].streams) say(e, peer, new_frame(ABORT, space, 0, 0, 0));
    }
    leave(e);
    Py_RETURN_NONE;
}

static PyObject *py_stop(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "O", &capsule)) return NULL;
    Engine *e = engine_of(capsule);
    if (!e) return NULL;
    if (!e->closing) {
        Py_BEGIN_ALLOW_THREADS
        stop(e);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"create", py_create, METH_VARARGS, NULL}, {"add_peer", py_add_peer, METH_VARARGS, NULL},
    {"post", py_post, METH_VARARGS, NULL},     {"state", py_state, METH_VARARGS, NULL},
    {"wait", py_wait, METH_VARARGS, NULL},     {"forget", py_forget, METH_VARARGS, NULL},
    {"abort", py_abort, METH_VARARGS, NULL},   {"stop", py_stop, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_tcp", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__tcp(void) { return PyModule_Create(&module); }
