/* Numbers of all types, combined by every operator. Included by each native transport. */
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#define LINE 64

enum { U8, I8, I16, I32, I64, F16, BF16, F32, F64 };
enum { SUM, MEAN, PROD, MIN, MAX, AND, OR, XOR };

static const u64 ELEMENT_BYTES[] = {1, 1, 2, 4, 8, 2, 2, 4, 8};

#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (u64 i = 0; i < n; i++)
#else
#define EACH _Pragma("GCC ivdep") for (u64 i = 0; i < n; i++)
#endif
#define ARITHMETIC(T)                                                                    \
    case SUM: case MEAN: EACH c[i] = (T)(a[i] + b[i]); break;                            \
    case PROD: EACH c[i] = (T)(a[i] * b[i]); break;                                      \
    case MIN: EACH c[i] = (a[i] < b[i]) | (a[i] != a[i]) ? a[i] : b[i]; break;           \
    case MAX: EACH c[i] = (a[i] > b[i]) | (a[i] != a[i]) ? a[i] : b[i]; break;

#define REALS(NAME, T)                                                                   \
    static void NAME(T *c, const T *a, const T *b, u64 n, int op) {                 \
        switch (op) { ARITHMETIC(T) }                                                    \
    }                                                                                    \
    static void NAME##_divide(T *c, u64 n, int by) { EACH c[i] = (T)(c[i] / (T)by); }

/* The sum of a mean is formed in 64 bits: 100 + 100 does not fit 8, nor does 128 as divisor. */
#define INTEGERS(NAME, T)                                                                \
    static void NAME(T *c, const T *a, const T *b, u64 n, int op) {                 \
        switch (op) {                                                                    \
            ARITHMETIC(T)                                                                \
            case AND: EACH c[i] = (T)(a[i] & b[i]); break;                               \
            case OR: EACH c[i] = (T)(a[i] | b[i]); break;                                \
            case XOR: EACH c[i] = (T)(a[i] ^ b[i]); break;                               \
        }                                                                                \
    }                                                                                    \
    static void NAME##_mean(T *c, const u8 **in, int count, u64 n) {                     \
        for (u64 i = 0; i < n; i++) {                                                    \
            u64 sum = 0; /* wraps without a trap, as the sum of tensors does */          \
            for (int j = 0; j < count; j++) sum += (u64)(int64_t)((const T *)in[j])[i];  \
            c[i] = (T)((int64_t)sum / count);                                            \
        }                                                                                \
    }

REALS(f32, float)
REALS(f64, double)
INTEGERS(b8, uint8_t)
INTEGERS(i8, int8_t)
INTEGERS(i16, int16_t)
INTEGERS(i32, int32_t)
INTEGERS(i64, int64_t)

static float from_bits(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static u32 to_bits(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* bfloat16 is the upper half of a float32; rounded to nearest, ties to even; NaN stays NaN */
static void widen_bf16(float *c, const uint16_t *a, u64 n) {
    EACH c[i] = from_bits((u32)a[i] << 16);
}
static void narrow_bf16(uint16_t *c, const float *a, u64 n) {
    EACH {
        u32 bits = to_bits(a[i]);
        u32 near = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        c[i] = (uint16_t)(a[i] != a[i] ? 0x7fc0u : near);
    }
}
#if defined(__FLT16_MAX__) && (defined(__aarch64__) || defined(__F16C__))
static void widen_f16(float *c, const uint16_t *a, u64 n) {
    const _Float16 *h = (const _Float16 *)a;
    EACH c[i] = (float)h[i];
}
static void narrow_f16(uint16_t *c, const float *a, u64 n) {
    _Float16 *h = (_Float16 *)c;
    EACH h[i] = (_Float16)a[i];
}
#else
static void widen_f16(float *c, const uint16_t *a, u64 n) {
    EACH {
        u32 sign = (u32)(a[i] & 0x8000u) << 16, rest = (u32)(a[i] & 0x7fffu) << 13;
        float scaled = from_bits(rest) * from_bits(0x77800000u); /* times 2^112 */
        u32 bits = rest >= 0x0f800000u ? rest | 0x7f800000u : to_bits(scaled);
        c[i] = from_bits(sign | bits);
    }
}
static void narrow_f16(uint16_t *c, const float *a, u64 n) {
    EACH {
        u32 bits = to_bits(a[i]), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu, half;
        if (rest > 0x7f800000u) half = 0x7e00u;
        else if (rest >= 0x477ff000u) half = 0x7c00u;
        else if (rest >= 0x38800000u) half = (rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13;
        else half = to_bits(from_bits(rest) + 0.5f) - 0x3f000000u; /* the sum rounds at 2^-24 */
        c[i] = (uint16_t)(sign | half);
    }
}
#endif

static void combine(int dtype, int op, void *c, const void *a, const void *b, u64 n) {
    switch (dtype) {
        case U8: b8(c, a, b, n, op); break;
        case I8: i8(c, a, b, n, op); break;
        case I16: i16(c, a, b, n, op); break;
        case I32: i32(c, a, b, n, op); break;
        case I64: i64(c, a, b, n, op); break;
        case F64: f64(c, a, b, n, op); break;
        default: f32(c, a, b, n, op);
    }
}

static void mean_of_integers(int dtype, void *c, const u8 **in, int count, u64 n) {
    switch (dtype) {
        case U8: b8_mean(c, in, count, n); break;
        case I8: i8_mean(c, in, count, n); break;
        case I16: i16_mean(c, in, count, n); break;
        case I32: i32_mean(c, in, count, n); break;
        default: i64_mean(c, in, count, n);
    }
}

#define CHUNK 8192 /* bytes that are combined at a time: they stay in the first cache */

static void widen(int dtype, float *c, const void *a, u64 n) {
    if (dtype == BF16) widen_bf16(c, a, n);
    else widen_f16(c, a, n);
}

/* out = in[0] (op) in[1] (op) …, always in this order; `out` may be one of the inputs. */
static void combine_block(int dtype, int op, u8 *out, const u8 **in, int count, u64 n) {
    _Alignas(LINE) u8 sum[CHUNK], next[CHUNK];
    u64 bytes = n * ELEMENT_BYTES[dtype];
    if (!n) return;
    if (dtype == F16 || dtype == BF16) {
        widen(dtype, (float *)sum, in[0], n);
        for (int j = 1; j < count; j++) {
            widen(dtype, (float *)next, in[j], n);
            f32((float *)sum, (float *)sum, (float *)next, n, op);
        }
        if (op == MEAN) f32_divide((float *)sum, n, count);
        if (dtype == BF16) narrow_bf16((uint16_t *)out, (float *)sum, n);
        else narrow_f16((uint16_t *)out, (float *)sum, n);
        return;
    }
    if (op == MEAN && dtype <= I64) {
        mean_of_integers(dtype, out, in, count, n);
        return;
    }
    if (count == 1) {
        if (out != in[0]) memcpy(out, in[0], bytes);
    } else {
        const u8 *total = in[0];
        for (int j = 1; j < count; j++) {
            u8 *into = j == count - 1 ? out : sum;
            combine(dtype, op, into, total, in[j], n);
            total = into;
        }
    }
    if (op != MEAN) return;
    if (dtype == F64) f64_divide((double *)out, n, count);
    else f32_divide((float *)out, n, count);
}
