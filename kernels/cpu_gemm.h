// Matrix products of few rows with packed weights: y[m] = W x[m], accumulated in float32.
//
// Weights are packed in panels of 32 outputs: float32 as [panel][in][32], bfloat16 as [panel][in/2][32][2], the
// operand order of vdpbf16ps. A piece of work is one panel for up to ROWS rows, so that a panel is read from memory
// once and then from the cache; the innermost loops keep up to BLOCK rows of 32 sums in registers (the outer-product
// scheme of Goto and van de Geijn, ACM TOMS 2008).
//
// Weights of 8 bits lie in the same order, with a scale for each output. A panel of them is widened, exactly, before its
// products, and their sums are scaled.
#pragma once

#include <vector>

#include "cpu_team.h"
#include "cpu_vector.h"

static const int PANEL = 32;
static const int64_t ROWS = 96;
#ifdef __AVX512F__
static const int BLOCK = 12;
#else
static const int BLOCK = 3;  // registers of half the width, and half as many
#endif

template <int R> static inline void product(const float* x, int64_t in, const float* w, f16v (*acc)[2]) {
    for (int64_t k = 0; k < in; k++) {
        f16v a = load(w + k * PANEL), b = load(w + k * PANEL + 16);
        for (int r = 0; r < R; r++) {
            acc[r][0] += a * x[r * in + k];
            acc[r][1] += b * x[r * in + k];
        }
    }
}

template <int R> static inline void product(const bf16* x, int64_t in, const bf16* w, f16v (*acc)[2]) {
    for (int64_t k = 0; k < in; k += 2) {
#ifdef __AVX512BF16__
        __m512bh a = (__m512bh)_mm512_loadu_si512(w + k * PANEL), b = (__m512bh)_mm512_loadu_si512(w + k * PANEL + 32);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, x + r * in + k, 4);
            __m512bh p = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = (f16v)_mm512_dpbf16_ps((__m512)acc[r][0], a, p);
            acc[r][1] = (f16v)_mm512_dpbf16_ps((__m512)acc[r][1], b, p);
        }
#else
        u16v a, b;
        memcpy(&a, w + k * PANEL, 64);
        memcpy(&b, w + k * PANEL + 32, 64);
        f16v a0 = (f16v)(a << 16), a1 = (f16v)(a & 0xffff0000u), b0 = (f16v)(b << 16), b1 = (f16v)(b & 0xffff0000u);
        for (int r = 0; r < R; r++) {
            float even = widen(x[r * in + k]), odd = widen(x[r * in + k + 1]);
            acc[r][0] += a0 * even + a1 * odd;
            acc[r][1] += b0 * even + b1 * odd;
        }
#endif
    }
}

struct Packed {
    const void* weights;
    const float* scales;  // of each output where the weights are int8, which is when there are any
};

template <int R, typename T, class Put>
static inline void block(const T* x, int64_t in, const T* w, const float* scales, int64_t row, int64_t panel, Put& put) {
    f16v acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = splat(0);
    product<R>(x + row * in, in, w, acc);
    const int64_t at = panel * PANEL;
    const f16v a = scales ? load(scales + at) : splat(1), b = scales ? load(scales + at + 16) : splat(1);
    for (int r = 0; r < R; r++) put(row + r, at, acc[r][0] * a, acc[r][1] * b);
}

template <typename T> static const T* panel_of(const Packed& w, int64_t panel, int64_t in) {
    if (!w.scales) return (const T*)w.weights + panel * in * PANEL;
    static thread_local std::vector<T> wide;
    if (int64_t(wide.size()) < in * PANEL) wide.resize(in * PANEL);
    const int8_t* narrow = (const int8_t*)w.weights + panel * in * PANEL;
    for (int64_t i = 0; i < in * PANEL; i += 16) store(wide.data() + i, load(narrow + i));
    return wide.data();
}

// put(row, first output, 16 sums, 16 sums) is called once for every row and panel of x [rows, in] times w.
template <typename T, class Put>
static void gemm(Team& team, const T* x, int64_t rows, int64_t in, const Packed& w, int64_t panels, Put put) {
    const int64_t parts = (rows + ROWS - 1) / ROWS;
    team.share(parts * panels, 1, [&](int64_t piece) {
        const int64_t panel = piece % panels, first = piece / panels * ROWS, n = std::min(ROWS, rows - first);
        const T* p = panel_of<T>(w, panel, in);
        const int64_t blocks = (n + BLOCK - 1) / BLOCK;
        for (int64_t i = 0, row = first; i < blocks; i++) {
            const int64_t size = n / blocks + (i < n % blocks);
            switch (size) {
#define CASE(N) case N: if constexpr (N <= BLOCK) block<N>(x, in, p, w.scales, row, panel, put); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
            }
            row += size;
        }
    });
}
