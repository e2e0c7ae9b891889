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
 * received into the receiver's. CTS is said in the order of the receives and for few bytes at a time,
 * so that of many senders none is far ahead of the others: TCP alone may give one of two senders
 * that share a link several times the rate of the other. Where a message is to be added, each piece
 * is added while it is in the cache and the next one is on the wire. A small message that came before its receive is kept.
 *
 * Files: frames.c sends, messages.c receives, endings.c gives up and loses, engine.c serves, posts
 * and waits, _tcp.c is the part for Python. Names are hidden outside of the library.
 *
 * Every length of a frame is checked before it is used; a frame that does not fit ends the
 * connection. No torch here.
 */
#define _GNU_SOURCE
#ifndef SHOAL_TCP_ENGINE_H
#define SHOAL_TCP_ENGINE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#pragma GCC visibility push(hidden)

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#define MAGIC 0x31706374u
#define MAX_STREAMS 16
#define MAX_DESCRIPTOR 80
#define EAGER_BYTES 32768u
#define FRAGMENT_BYTES (256u << 10)
#define FRAGMENT_ALIGN 64u
#define SCRATCH_BYTES (128u << 10)
#define KEPT_BYTES (256ull << 20) /* of messages that no receive has asked for, per peer */
#define READS_PER_TURN 4
#define GRACE_NS 1000000000ull /* from the end of one stream to the loss of the peer */
#define GRANTED_BYTES (16ull << 20) /* of large messages that may come at a time, of all peers */
#define SLICE_NS 100000000ull
#define MAX_ABORTS 65536u
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
    struct Message *incoming; /* of a receive: the large message that it has met */
    u32 space, descriptor_bytes;
    u64 tag, message, bytes, handed; /* handed: bytes that streams have taken */
    u64 at; /* of a receive: bytes of all that were posted before */
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
    u64 got, claimed; /* bytes that were read, and those of fragments that have begun */
    int dropped, granted; /* granted: CTS was said, and not all has come */
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
    u64 next_message, deadline_ns, kept_bytes, granted_bytes;
    Message *messages, *last;
    u64 look; /* the latest one that has found a receive from it */
} Peer;

typedef struct {
    int rank, size, wake[2];
    Peer *peers;
    Op *ops, *last_op;
    u32 *aborted; /* pairs (peer, space) */
    u64 aborts;
    u64 close_ns, granted_bytes, asked_bytes; /* asked: of all receives that were posted */
    u64 looks; /* how often the senders of a call were counted */
    int closing, connected;
    _Atomic int wanted;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    struct pollfd *polled;
    int *polled_stream; /* peer * MAX_STREAMS + stream */
    int room;
} Engine;

static inline u64 least(u64 a, u64 b) { return a < b ? a : b; }

/* engine.c */
u64 now_ns(void);
void enter(Engine *e);
void leave(Engine *e);
void wake(Engine *e);
void finish(Engine *e, Op *op, int outcome);
Engine *create(int rank, int size);
int add_peer(Engine *e, int peer, const int *fds, int count);
int has_any(Engine *e, const Op *op);
void post(Engine *e, Op *op);
int state_of(Engine *e, const Op *op);
int wait_for(Engine *e, Op *op, u64 ns);
int expire(Engine *e, Op *op);
void forget(Engine *e, Op *op);
void leave_space(Engine *e, u32 space);
void stop(Engine *e);
void destroy(Engine *e);

/* frames.c */
Frame *new_frame(u32 kind, u32 space, u64 tag, u64 message, u64 bytes);
void free_frame(Frame *f);
int has_fragment(const Engine *e, int peer);
int carries_data(const Peer *p, int number);
void stream_ended(Peer *p, Stream *s, int why);
void write_stream(Engine *e, int peer, int number);
void write_all(Engine *e, int peer);
void say(Engine *e, int peer, Frame *f);

/* messages.c */
int can_combine(int dtype, int operator);
void match(Engine *e, int peer, Message *m, Op *op);
Message *unmatched(const Peer *p, const Op *op);
int is_whole(const Message *m);
void remove_message(Engine *e, Peer *p, Message *m);
void grant(Engine *e);
void read_stream(Engine *e, int peer, int number);

/* endings.c */
void give_up(Engine *e, Op *op, int outcome, int why);
void lose(Engine *e, int peer);
int is_aborted(const Engine *e, int peer, u32 space);
int fail_space(Engine *e, int peer, u32 space);
void check_ends(Engine *e);
int may_close(Engine *e);

#pragma GCC visibility pop
#endif
