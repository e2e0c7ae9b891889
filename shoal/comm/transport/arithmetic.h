/* Numbers of all types, combined by every operator. Included by each native transport. */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#define LINE 64
#define MAX_INPUTS 256

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
    static void NAME(T *c, const T *a, const T *b, u64 n, int op) {                      \
        switch (op) { ARITHMETIC(T) }                                                    \
    }

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

/* ---------------------------------------------------------------- sums in registers
 *
 * in[0] + in[1] + … in this order, divided by `by` if it is not 1, to c, and to `also` where it is given. A result is
 * formed in registers: each input is read once, and nothing in between is written. `c` may be one of the inputs. */
#define SUMS(T)                                                                          \
    typedef T T##_vector __attribute__((vector_size(16), aligned(sizeof(T)), may_alias)); \
    static void sum_##T(T *c, T *also, const u8 **in, int count, u64 n, T by) {          \
        enum { WIDTH = 16 / sizeof(T), STEP = 4 * WIDTH };                               \
        u64 i = 0;                                                                       \
        for (; i + STEP <= n; i += STEP) {                                               \
            T##_vector s[4];                                                             \
            for (int k = 0; k < 4; k++) s[k] = ((const T##_vector *)((const T *)in[0] + i))[k]; \
            for (int j = 1; j < count; j++)                                              \
                for (int k = 0; k < 4; k++) s[k] += ((const T##_vector *)((const T *)in[j] + i))[k]; \
            if (by != 1)                                                                 \
                for (int k = 0; k < 4; k++) s[k] /= by;                                  \
            for (int k = 0; k < 4; k++) ((T##_vector *)(c + i))[k] = s[k];               \
            for (int k = 0; also && k < 4; k++) ((T##_vector *)(also + i))[k] = s[k];    \
        }                                                                                \
        for (; i < n; i++) {                                                             \
            T s = ((const T *)in[0])[i];                                                 \
            for (int j = 1; j < count; j++) s += ((const T *)in[j])[i];                  \
            c[i] = by != 1 ? s / by : s;                                                 \
            if (also) also[i] = c[i];                                                    \
        }                                                                                \
    }
SUMS(float)
SUMS(double)

/* Types of 16 bits, summed in float32, eight at a time; returns how many of them it has summed. */
#if defined(__x86_64__)
#define WIDE static inline __attribute__((target("avx2,f16c"), always_inline))
WIDE __m256 widened(int dtype, const u8 *a) {
    __m128i bits = _mm_loadu_si128((const __m128i *)a);
    if (dtype == F16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
WIDE __m128i narrowed(int dtype, __m256 s) {
    if (dtype == F16) return _mm256_cvtps_ph(s, _MM_FROUND_TO_NEAREST_INT);
    __m256i bits = _mm256_castps_si256(s), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(s, s, _CMP_UNORD_Q));
    near = _mm256_srli_epi32(_mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc00000), is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(near), _mm256_extracti128_si256(near, 1));
}
WIDE u64 sum_wide(int dtype, u8 *c, u8 *also, const u8 **in, int count, u64 n, float by) {
    u64 i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 s = widened(dtype, in[0] + 2 * i);
        for (int j = 1; j < count; j++) s = _mm256_add_ps(s, widened(dtype, in[j] + 2 * i));
        if (by != 1) s = _mm256_div_ps(s, _mm256_set1_ps(by));
        __m128i result = narrowed(dtype, s);
        _mm_storeu_si128((__m128i *)(c + 2 * i), result);
        if (also) _mm_storeu_si128((__m128i *)(also + 2 * i), result);
    }
    return i;
}
__attribute__((target("avx2,f16c")))
static u64 sum_f16(u8 *c, u8 *also, const u8 **in, int count, u64 n, float by) {
    return sum_wide(F16, c, also, in, count, n, by);
}
__attribute__((target("avx2,f16c")))
static u64 sum_bf16(u8 *c, u8 *also, const u8 **in, int count, u64 n, float by) {
    return sum_wide(BF16, c, also, in, count, n, by);
}
static u64 sum_halves(int dtype, u8 *c, u8 *also, const u8 **in, int count, u64 n, float by) {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return 0;
    return dtype == F16 ? sum_f16(c, also, in, count, n, by) : sum_bf16(c, also, in, count, n, by);
}
#else
static u64 sum_halves(int dtype, u8 *c, u8 *also, const u8 **in, int count, u64 n, float by) {
    (void)dtype, (void)c, (void)also, (void)in, (void)count, (void)n, (void)by;
    return 0; /* widen and narrow are vector instructions already */
}
#endif

#define CHUNK 8192 /* bytes that are combined at a time: they stay in the first cache */

static void widen(int dtype, float *c, const void *a, u64 n) {
    if (dtype == BF16) widen_bf16(c, a, n);
    else widen_f16(c, a, n);
}

/* Sums and means of floating point; returns how many numbers it has summed. */
static u64 sum_block(int dtype, int op, u8 *out, u8 *also, const u8 **in, int count, u64 n) {
    int by = op == MEAN ? count : 1;
    if (op != SUM && op != MEAN) return 0;
    switch (dtype) {
        case F16: case BF16: return sum_halves(dtype, out, also, in, count, n, (float)by);
        case F32: sum_float((float *)out, (float *)also, in, count, n, (float)by); return n;
        case F64: sum_double((double *)out, (double *)also, in, count, n, by); return n;
        default: return 0;
    }
}

static void combine_halves(int dtype, int op, u8 *out, const u8 **in, int count, u64 n) {
    _Alignas(LINE) float sum[CHUNK / 4], next[CHUNK / 4];
    widen(dtype, sum, in[0], n);
    for (int j = 1; j < count; j++) {
        widen(dtype, next, in[j], n);
        f32(sum, sum, next, n, op);
    }
    if (op == MEAN) EACH sum[i] /= (float)count;
    if (dtype == BF16) narrow_bf16((uint16_t *)out, sum, n);
    else narrow_f16((uint16_t *)out, sum, n);
}

/* out = in[0] (op) in[1] (op) …, always in this order; `out` may be one of the inputs.
 * At most CHUNK bytes, of float32 for types of 16 bits. */
static void combine_block(int dtype, int op, u8 *out, const u8 **in, int count, u64 n) {
    _Alignas(LINE) u8 sum[CHUNK];
    if (dtype == F16 || dtype == BF16) {
        combine_halves(dtype, op, out, in, count, n);
    } else if (op == MEAN) {
        mean_of_integers(dtype, out, in, count, n);
    } else if (count == 1) {
        if (out != in[0]) memcpy(out, in[0], n * ELEMENT_BYTES[dtype]);
    } else {
        const u8 *total = in[0];
        for (int j = 1; j < count; j++) {
            u8 *into = j == count - 1 ? out : sum;
            combine(dtype, op, into, total, in[j], n);
            total = into;
        }
    }
}

/* As combine_block for any length; a copy of the result goes to `also`, where it is given. */
static void combine_all(int dtype, int op, u8 *out, u8 *also, const u8 **in, int count, u64 n) {
    const u8 *at[MAX_INPUTS];
    u64 size = ELEMENT_BYTES[dtype], step = CHUNK / (size < 4 ? 4 : size);
    for (u64 done = sum_block(dtype, op, out, also, in, count, n); done < n; done += step) {
        u64 part = n - done < step ? n - done : step;
        for (int j = 0; j < count; j++) at[j] = in[j] + done * size;
        combine_block(dtype, op, out + done * size, at, count, part);
        if (also) memcpy(also + done * size, out + done * size, part * size);
    }
}
