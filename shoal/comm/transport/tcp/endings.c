/* Ends: of operations that are given up, of peers that are lost, of groups, of the engine. */
#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/sockios.h>
#endif

/* No stream uses the memory of this operation any more. */
static void detach(Engine *e, Op *op) {
    for (int peer = 0; peer < e->size; peer++) {
        Peer *p = &e->peers[peer];
        for (Message *m = p->messages, *next; m; m = next) {
            next = m->next;
            if (m->op != op) continue;
            m->op = NULL;
            m->dropped = 1;
            op->incoming = NULL;
            if (m->head.kind == RTS && !m->granted) { /* it need not come */
                say(e, peer, new_frame(REFUSED, 0, 0, m->head.message, 0));
                remove_message(e, p, m);
            }
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

void give_up(Engine *e, Op *op, int outcome, int why) {
    detach(e, op);
    if (op->is_send && (op->phase == ANNOUNCED || op->phase == READY))
        say(e, op->peer, new_frame(DROPPED, 0, 0, op->message, 0));
    op->why = why;
    finish(e, op, outcome);
}

void lose(Engine *e, int peer) {
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
        if (m->head.kind == RTS || !is_whole(m)) remove_message(e, p, m);
    }
    grant(e);
    int left = 0;
    for (int i = 0; i < e->size; i++) left += e->peers[i].streams && !e->peers[i].is_lost;
    if (left) return;
    for (Op *op = e->ops, *next; op; op = next) { /* receives from any source */
        next = op->next;
        op->source = peer;
        give_up(e, op, LOST, p->why);
    }
}

int is_aborted(const Engine *e, int peer, u32 space) {
    for (u64 i = 0; i < e->aborts; i++)
        if (e->aborted[2 * i] == (u32)peer && e->aborted[2 * i + 1] == space) return 1;
    return 0;
}

/* The peer has left the group of this space; with the own rank for a peer: this rank has.
 * What a peer had sent before still arrives: for what it gave up it says DROPPED.
 * 0 if there is no room to remember it. */
int fail_space(Engine *e, int peer, u32 space) {
    int own = peer == e->rank;
    if (is_aborted(e, peer, space)) return 1;
    u32 *more = e->aborts < MAX_ABORTS ? realloc(e->aborted, (e->aborts + 1) * 2 * sizeof(u32)) : NULL;
    if (!more) return 0;
    e->aborted = more;
    e->aborted[2 * e->aborts] = (u32)peer;
    e->aborted[2 * e->aborts++ + 1] = space;
    for (Op *op = e->ops, *next; op; op = next) {
        next = op->next;
        int whose = op->phase == MATCHED ? op->source : op->peer;
        if (op->space != space || (!own && (whose != peer || op->phase == MATCHED))) continue;
        if (!own && op->phase == READY) continue; /* it has asked for it */
        if (!own) op->source = peer;
        give_up(e, op, own ? CLOSED : LOST, WHY_ENDED);
    }
    return 1;
}

void check_ends(Engine *e) {
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
int may_close(Engine *e) {
    int waiting = 0;
    for (int peer = 0; peer < e->size; peer++)
        for (int i = 0; i < e->peers[peer].streams; i++) {
            Stream *s = &e->peers[peer].stream[i];
            if (!s->ended && !s->out && s->fd >= 0) shutdown(s->fd, SHUT_WR);
            waiting |= unsent(s) != 0;
        }
    return !waiting || now_ns() > e->close_ns;
}
