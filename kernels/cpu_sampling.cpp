// Drawing tokens on the CPU: one pass or a few over each row of logits, rows shared among threads.

#include <vector>

#include "cpu_vector.h"

static const int64_t SEGMENT = 256;
static const int BUCKETS = 2048;
static const float LEAST = -87.0f;  // under it e^s is nothing in float32

// The largest of a row, and the first index that has it; `finite` is false when the row holds a NaN or its largest is
// infinite.
struct Peak { float value; int64_t index; bool finite; };

static Peak peak(const float* x, int64_t width) {
    f16v best = splat(-INFINITY);
    i16v at{}, here = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, broken{};
    int64_t i = 0;
    for (; i + 16 <= width; i += 16, here += 16) {
        f16v v = load(x + i);
        broken |= v != v;
        i16v better = v > best;
        best = better ? v : best;
        at = better ? here : at;
    }
    Peak p{-INFINITY, 0, true};
    for (int lane = 0; lane < 16; lane++) {
        if (broken[lane]) p.finite = false;
        if (best[lane] > p.value || (best[lane] == p.value && at[lane] < p.index)) p.value = best[lane], p.index = at[lane];
    }
    for (; i < width; i++) {
        if (x[i] != x[i]) p.finite = false;
        if (x[i] > p.value) p.value = x[i], p.index = i;
    }
    p.finite = p.finite && std::isfinite(p.value);
    return p;
}

// Buckets of non-positive numbers, the largest first, eight to a power of two.
static inline int bucket(float s) {
    s = -s;
    uint32_t bits; memcpy(&bits, &s, 4);
    return (bits & 0x7fffffffu) >> 20;
}

// The numbers of one bucket that are not under `cut`, the largest first.
static void members(const float* s, int64_t width, int which, float cut, std::vector<float>& out) {
    out.clear();
    for (int64_t i = 0; i < width; i++)
        if (s[i] >= cut && bucket(s[i]) == which) out.push_back(s[i]);
    std::sort(out.begin(), out.end(), [](float a, float b) { return a > b; });
}

static float kth_largest(const float* s, int64_t width, int64_t k, std::vector<float>& some) {
    int32_t counts[BUCKETS] = {0};
    for (int64_t i = 0; i < width; i++) counts[bucket(s[i])]++;
    int b = 0;
    for (; b < BUCKETS - 1 && counts[b] < k; b++) k -= counts[b];
    members(s, width, b, -INFINITY, some);
    return some.empty() ? -INFINITY : some[std::min<int64_t>(k, some.size()) - 1];
}

// Nucleus sampling (Holtzman et al., ICLR 2020): the smallest of the likeliest numbers that together have `share` of all
// mass that is not under `cut`.
static float nucleus(const float* s, int64_t width, double share, float cut, std::vector<float>& some) {
    double mass[BUCKETS] = {0};
    alignas(64) float e[16];
    for (int64_t i = 0; i < width; i += 16) {
        const int n = int(std::min<int64_t>(16, width - i));
        f16v v = splat(-INFINITY);
        memcpy(&v, s + i, n * sizeof(float));
        store(e, vexp(v));
        for (int j = 0; j < n; j++)
            if (s[i + j] >= cut) mass[bucket(s[i + j])] += e[j];
    }
    double total = 0, sum = 0;
    for (double m : mass) total += m;
    int b = 0;
    for (; b < BUCKETS - 1 && sum + mass[b] < share * total; b++) sum += mass[b];
    members(s, width, b, cut, some);
    for (float v : some)
        if ((sum += std::exp(v)) >= share * total) return v;
    return some.empty() ? cut : some.back();
}

// One token in proportion to e^s of what is not under `cut`: Gumbel noise decides among segments, then inside of one.
static int64_t choose(const float* s, int64_t width, float cut, const double* noise) {
    int64_t best = 0;
    double top = -INFINITY;
    for (int64_t first = 0, g = 0; first < width; first += SEGMENT, g++) {
        const int64_t end = std::min(first + SEGMENT, width);
        f16v sums = splat(0);
        for (int64_t i = first; i < end; i += 16) {
            f16v v = splat(-INFINITY);
            memcpy(&v, s + i, std::min<int64_t>(16, end - i) * sizeof(float));
            sums += v >= cut ? vexp(v) : splat(0);
        }
        const double score = std::log(double(sum(sums))) + noise[SEGMENT + g];
        if (score > top) top = score, best = first;
    }
    const int64_t first = best, end = std::min(first + SEGMENT, width);
    top = -INFINITY;
    for (int64_t i = first; i < end; i++)
        if (s[i] >= cut && s[i] + noise[i - first] > top) top = s[i] + noise[i - first], best = i;
    return best;
}

extern "C" {

// tokens[rows]: the index of each row's largest logit, -1 for a row that is not finite. Rows are `stride` apart.
void plait_argmax(const float* x, int64_t rows, int64_t stride, int64_t width, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic, 4) if (rows > 4)
    for (int64_t r = 0; r < rows; r++) {
        Peak p = peak(x + r * stride, width);
        tokens[r] = p.finite ? p.index : -1;
    }
}

// tokens[n]: one drawn from each of the `n` rows whose numbers are in `which`, with its own temperature > 0, top_k (0 for
// all), top_p and min_p, and noise [n, lanes].
void plait_draw(const float* x, const int64_t* which, int64_t n, int64_t stride, int64_t width, const float* temperature,
                const int64_t* top_k, const float* top_p, const float* min_p, const double* noise, int64_t lanes,
                int64_t* tokens) {
#pragma omp parallel
    {
        std::vector<float> s(width), some;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n; i++) {
            const float* row = x + which[i] * stride;
            const Peak p = peak(row, width);
            if (!p.finite) { tokens[i] = -1; continue; }
            for (int64_t j = 0; j < width; j++) s[j] = (row[j] - p.value) / temperature[i];
            float cut = LEAST;
            if (top_k[i] > 0 && top_k[i] < width) cut = std::max(cut, kth_largest(s.data(), width, top_k[i], some));
            if (top_p[i] < 1) cut = std::max(cut, nucleus(s.data(), width, top_p[i], cut, some));
            if (min_p[i] > 0) cut = std::max(cut, std::log(min_p[i]));
            tokens[i] = choose(s.data(), width, cut, noise + i * lanes);
        }
    }
}

}  // extern "C"
