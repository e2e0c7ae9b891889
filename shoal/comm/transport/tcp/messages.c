/* Receiving: frames that arrive, and the receives that they belong to. */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "../arithmetic.h"

int can_combine(int dtype, int operator) { return dtype >= U8 && dtype <= F64 && operator <= XOR; }

static void store(const Op *op, u64 offset, const u8 *data, u64 bytes) {
    u8 *into = op->data + offset;
    if (op->operator == COPY) {
        memcpy(into, data, bytes);
        return;
    }
    const u8 *in[2] = {into, data};
    combine_all(op->dtype, op->operator, into, NULL, in, 2, bytes / ELEMENT_BYTES[op->dtype]);
}

/* Of memory that a message takes here, so that one that no receive asks for is not free. */
static u64 held_bytes(const Message *m) { return sizeof *m + (m->kept ? m->head.bytes : 0); }

static void take_grant_back(Engine *e, Peer *p, Message *m) {
    if (!m->granted) return;
    m->granted = 0;
    p->granted_bytes -= m->head.bytes;
    e->granted_bytes -= m->head.bytes;
}

/* Whether each of the peers sends in the call of this receive, as to the root of a star. In other
 * calls a sender may be ahead because it is a phase ahead. */
static int all_send(Engine *e, const Op *of) {
    int sources = 0;
    e->looks++;
    for (const Op *op = e->ops; op; op = op->next) {
        if (op->is_send || op->source < 0 || op->space != of->space || op->tag != of->tag) continue;
        Peer *p = &e->peers[op->source];
        sources += p->look != e->looks;
        p->look = e->looks;
    }
    return sources == e->connected;
}

/* Whether a sender would be more than a message ahead of another one of the same call, which has not
 * sent all of `oldest`. */
static int is_ahead(const Engine *e, const Op *oldest, const Op *op) {
    return op->source != oldest->source && op->space == oldest->space && op->tag == oldest->tag
           && op->at - oldest->at >= op->bytes * (u64)(e->connected + 1);
}

/* Let large messages come: those of the oldest receives, and at least one of each peer that is not
 * ahead of the others. */
void grant(Engine *e) {
    const Op *oldest = NULL;
    int in_turns = -1; /* whether all peers send in the call of the oldest; not known yet */
    for (Op *op = e->ops; op; op = op->next) {
        Message *m = op->incoming;
        if (!m) continue;
        if (!oldest) oldest = op;
        if (m->granted) continue;
        if (is_ahead(e, oldest, op)) {
            if (in_turns < 0) in_turns = all_send(e, oldest);
            if (in_turns) continue;
        }
        Peer *p = &e->peers[op->source];
        if (p->granted_bytes && e->granted_bytes + m->head.bytes > GRANTED_BYTES) continue;
        m->granted = 1;
        p->granted_bytes += m->head.bytes;
        e->granted_bytes += m->head.bytes;
        say(e, op->source, new_frame(CTS, 0, 0, m->head.message, 0));
    }
}

void remove_message(Engine *e, Peer *p, Message *m) {
    Message **at = &p->messages, *before = NULL;
    while (*at && *at != m) {
        before = *at;
        at = &(*at)->next;
    }
    if (*at) *at = m->next;
    if (p->last == m) p->last = before;
    p->kept_bytes -= held_bytes(m);
    take_grant_back(e, p, m);
    free(m->kept);
    free(m);
}

int is_whole(const Message *m) { return m->got == m->head.bytes; }

static void message_done(Engine *e, Peer *p, Message *m) {
    if (m->op) {
        if (m->kept) store(m->op, 0, m->kept, m->head.bytes);
        m->op->incoming = NULL;
        finish(e, m->op, FINE);
    }
    remove_message(e, p, m);
    grant(e);
}

static int fits(const Op *op, const Message *m) {
    return op->bytes == m->head.bytes && op->descriptor_bytes == m->head.descriptor_bytes
           && !memcmp(op->descriptor, m->head.descriptor, op->descriptor_bytes);
}

/* A receive and a message have met. */
void match(Engine *e, int peer, Message *m, Op *op) {
    op->source = peer;
    op->phase = MATCHED;
    if (!fits(op, m)) {
        op->descriptor_bytes = m->head.descriptor_bytes;
        memcpy(op->descriptor, m->head.descriptor, MAX_DESCRIPTOR);
        finish(e, op, MISMATCH);
        m->dropped = 1;
        if (m->head.kind == RTS) say(e, peer, new_frame(REFUSED, 0, 0, m->head.message, 0));
        if (m->head.kind == RTS || is_whole(m)) remove_message(e, &e->peers[peer], m);
        return;
    }
    m->op = op;
    if (m->head.kind == RTS) {
        op->incoming = m;
        grant(e);
    } else if (is_whole(m)) {
        message_done(e, &e->peers[peer], m);
    }
}

static Op *receive_for(const Engine *e, int peer, const Head *h) {
    for (Op *op = e->ops; op; op = op->next)
        if (!op->is_send && op->phase == POSTED && (op->peer == peer || op->peer < 0)
            && op->space == h->space && op->tag == h->tag)
            return op;
    return NULL;
}

Message *unmatched(const Peer *p, const Op *op) {
    for (Message *m = p->messages; m; m = m->next)
        if (!m->op && !m->dropped && m->head.space == op->space && m->head.tag == op->tag) return m;
    return NULL;
}

/* EAGER or RTS; 0 if there is no memory. A message without bytes may be gone afterwards. */
static int announced(Engine *e, int peer, Stream *s) {
    Peer *p = &e->peers[peer];
    const Head *h = &s->head;
    Message *m = calloc(1, sizeof *m);
    if (!m) return 0;
    m->head = *h;
    Op *op = receive_for(e, peer, h);
    int is_direct = op && fits(op, m);
    if (h->kind == EAGER && h->bytes && !is_direct) {
        m->kept = malloc(h->bytes);
        if (!m->kept) {
            free(m);
            return 0;
        }
    }
    p->kept_bytes += held_bytes(m);
    if (p->last) p->last->next = m;
    else p->messages = m;
    p->last = m;
    if (h->kind == EAGER && h->bytes) {
        s->message = m;
        if (is_direct) {
            op->source = peer;
            op->phase = MATCHED;
            m->op = op;
        } else if (op) {
            match(e, peer, m, op);
        }
        return 1;
    }
    if (op) match(e, peer, m, op);
    return 1;
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

/* A stream may be in the middle of it, so it stays until the peer is lost. */
static void drop_message(Engine *e, int peer, Message *m) {
    Op *op = m->op;
    m->op = NULL;
    m->dropped = 1;
    take_grant_back(e, &e->peers[peer], m);
    if (!op) return;
    op->source = peer;
    op->incoming = NULL;
    finish(e, op, LOST);
    grant(e);
}

/* Bytes of a message that a fragment brings: none twice, and none that was not asked for. So a
 * message is whole only when no stream is in the middle of it. */
static int claim(Message *m, u64 bytes) {
    if ((!m->granted && !m->dropped) || bytes > m->head.bytes - m->claimed) return 0;
    m->claimed += bytes;
    return 1;
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
        case EAGER:
            if (h->bytes > EAGER_BYTES || (!e->closing && !announced(e, peer, s))) return 0;
            s->at = 0;
            break;
        case RTS:
            if (h->bytes <= EAGER_BYTES || (!e->closing && !announced(e, peer, s))) return 0;
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
        case ABORT: return fail_space(e, peer, h->space);
        case DATA: {
            Message *m = message_numbered(p, h->message);
            if (!h->bytes || h->bytes > FRAGMENT_BYTES) return 0;
            if (m && (h->offset > m->head.bytes || h->bytes > m->head.bytes - h->offset)) return 0;
            if (h->offset % FRAGMENT_ALIGN || (m && !claim(m, h->bytes))) return 0;
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

static ssize_t read_payload(Peer *p, Stream *s) {
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

void read_stream(Engine *e, int peer, int number) {
    Peer *p = &e->peers[peer];
    Stream *s = &p->stream[number];
    for (int turn = 0; turn < READS_PER_TURN && !s->ended; turn++) {
        if (s->left) {
            if (read_payload(p, s) <= 0) return;
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
