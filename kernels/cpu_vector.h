// Vectors of 16 floats as GCC/Clang vector extensions, which the compiler lowers to AVX-512, AVX2 or NEON.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16v __attribute__((vector_size(32)));
struct bf16 { uint16_t bits; };


static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; memcpy(&f, &u, 4); return f; }
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, bf16* out) {
    uint32_t u; memcpy(&u, &x, 4);
    out->bits = uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline f16v splat(float x) { return f16v{} + x; }
static inline f16v load(const float* p) { f16v v; memcpy(&v, p, 64); return v; }
typedef int8_t c16v __attribute__((vector_size(16)));
static inline f16v load(const int8_t* p) {
#ifdef __AVX512F__
    // GCC 12 widens element by element what follows.
    return (f16v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#endif
    c16v c; memcpy(&c, p, 16);
    return __builtin_convertvector(__builtin_convertvector(c, i16v), f16v);
}
static inline f16v load(const bf16* p) {
    h16v h; memcpy(&h, p, 32);
    return (f16v)(__builtin_convertvector(h, u16v) << 16);
}
static inline void store(float* p, f16v v) { memcpy(p, &v, 64); }
static inline void store(bf16* p, f16v v) {
    u16v u = (u16v)v;
    h16v h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, h16v);
    memcpy(p, &h, 32);
}
template <typename T> static inline f16v rounded(f16v v);
template <> inline f16v rounded<float>(f16v v) { return v; }
template <> inline f16v rounded<bf16>(f16v v) {
    u16v u = (u16v)v;
    return (f16v)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u);
}
static inline f16v vmax(f16v a, f16v b) { return a > b ? a : b; }

// Over all lanes, by halves: a chain of sixteen would wait for each of its links.
typedef float f8v __attribute__((vector_size(32)));
typedef float f4v __attribute__((vector_size(16)));
static inline f8v low(f16v v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
static inline f8v high(f16v v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
static inline f4v low(f8v v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
static inline f4v high(f8v v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
static inline float sum(f16v v) {
    const f8v h = low(v) + high(v);
    const f4v q = low(h) + high(h);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
static inline float largest(f16v v) {
    const f8v a = low(v), b = high(v), h = a > b ? a : b;
    const f4v c = low(h), d = high(h), q = c > d ? c : d;
    return std::max(std::max(q[0], q[2]), std::max(q[1], q[3]));
}

// e^x to 2 ulp by Cephes' expf: range reduction by ln 2 in two parts, then a polynomial of degree 6.
static inline f16v vexp(f16v x) {
    x = vmax(x, splat(-87.3f));
    x = x < splat(88.0f) ? x : splat(88.0f);
    f16v t = x * 1.44269504f;
    i16v n = __builtin_convertvector(t + (t < splat(0) ? splat(-0.5f) : splat(0.5f)), i16v);
    f16v k = __builtin_convertvector(n, f16v);
    f16v r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    f16v p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (f16v)((i16v)p + (n << 23));
}
