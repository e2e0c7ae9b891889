/* Sending: frames, and which stream takes the next fragment of a large message. */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

void free_frame(Frame *f) {
    free(f->own);
    free(f);
}

Frame *new_frame(u32 kind, u32 space, u64 tag, u64 message, u64 bytes) {
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

int has_fragment(const Engine *e, int peer) {
    for (const Op *op = e->ops; op; op = op->next)
        if (op->is_send && op->peer == peer && op->phase == READY && op->handed < op->bytes) return 1;
    return 0;
}

void stream_ended(Peer *p, Stream *s, int why) {
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

int carries_data(const Peer *p, int number) { return number > 0 || p->streams == 1; }

void write_stream(Engine *e, int peer, int number) {
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

void write_all(Engine *e, int peer) {
    for (int i = 0; i < e->peers[peer].streams; i++) write_stream(e, peer, i);
}

void say(Engine *e, int peer, Frame *f) {
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
