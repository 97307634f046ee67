// Sampling: adjust, filter, add noise, take the largest.
#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.hpp"

namespace slip {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr size_t kFew = 2048;  // tokens of a mask that are looked at one by one
constexpr float kFar = 16.0f;  // a token this far below the best weighs less than 2^-23

Noise noise_of(const SampleInput& in, int row) {
  return {in.seed[row], (uint32_t)in.choice[row], (uint32_t)in.position[row], (uint32_t)in.stream[row]};
}

struct Candidate {
  float value;
  int token;
  bool operator<(const Candidate& o) const { return value != o.value ? value > o.value : token < o.token; }
};

void adjust(std::vector<float>& x, const SampleInput& in, int row) {
  for (int i = in.adjust_start[row]; i < in.adjust_start[row + 1]; ++i) {
    float& v = x[in.adjust_token[i]];
    v = (v > 0 ? v / in.adjust_mul[i] : v * in.adjust_mul[i]) + in.adjust_add[i];
  }
  if (in.mask_of[row] < 0) return;
  const uint32_t* mask = in.masks + (size_t)in.mask_of[row] * in.mask_words;
  const size_t told = std::min(x.size(), (size_t)in.mask_words * 32);
  for (size_t first = 0; first < told; first += 32) {
    const uint32_t bits = mask[first / 32];
    if (bits == ~0u) continue;
    const size_t end = std::min(first + 32, told);
    for (size_t i = first; i < end; ++i) x[i] = bits >> (i - first) & 1 ? x[i] : kNever;
  }
  std::fill(x.begin() + told, x.end(), kNever);
}

// The places that a row's mask allows, or none if there are too many for it to be worth while.
std::vector<int> allowed(int vocabulary, const SampleInput& in, int row) {
  const uint32_t* mask = in.masks + (size_t)in.mask_of[row] * in.mask_words;
  const int words = std::min(in.mask_words, (vocabulary + 31) / 32);
  std::vector<int> places;
  for (int w = 0; w < words; ++w)
    for (uint32_t bits = mask[w]; bits; bits &= bits - 1) {
      const int place = w * 32 + __builtin_ctz(bits);
      if (place >= vocabulary) break;
      if (places.size() == kFew) return {};
      places.push_back(place);
    }
  return places;
}

// The place of the one that is drawn of a few, without filters.
int draw_of_few(const float* logits, const std::vector<int>& places, const int32_t* ids, const SampleInput& in, int row) {
  std::vector<float> noise(places.size(), 0.0f);
  const bool noisy = in.temperature[row] > 0;
  const float scale = noisy ? 1.0f / in.temperature[row] : 1.0f;
  if (noisy) {
    std::vector<int32_t> tokens(places.begin(), places.end());
    if (ids) for (int32_t& token : tokens) token = ids[token];
    kernels().token_noise(tokens.data(), (int)tokens.size(), noise_of(in, row), noise.data());
  }
  float best = kNever;
  int at = places[0];
  for (size_t i = 0; i < places.size(); ++i) {
    const float value = __builtin_fmaf(logits[places[i]], scale, noise[i]);  // as where all tokens are looked at
    if (value > best) {
      best = value;
      at = places[i];
    }
  }
  return at;
}

// How many of the sorted candidates survive; `whole` is the sum of all weights if they are not all there.
size_t surviving(const std::vector<Candidate>& c, int top_k, float top_p, float min_p, double whole) {
  size_t n = c.size();
  if (top_k > 0 && (size_t)top_k < n) {
    n = top_k;
    whole = 0;
    for (size_t i = 0; i < n; ++i) whole += std::exp((double)c[i].value - c[0].value);
  }
  double before = 0;
  for (size_t i = 0; i < n; ++i) {
    double weight = std::exp((double)c[i].value - c[0].value);
    if ((top_p < 1.0f && before >= (double)top_p * whole) || weight < (double)min_p) return i;
    before += weight;
  }
  return n;
}

// Candidates, sorted, such that the filters cut inside them; all tokens if need be.
// `rough`: none of those that are too far below the best, whether or not a filter cuts them off.
std::vector<Candidate> candidates(const std::vector<float>& scaled, int top_k, float top_p, float min_p, bool rough, size_t& keep) {
  float peak;
  int at;
  kernels().argmax(scaled.data(), (int)scaled.size(), &peak, &at);
  double whole = kernels().sum_exp(scaled.data(), peak, (int)scaled.size());
  for (float reach : {kFar, std::numeric_limits<float>::infinity()}) {
    std::vector<Candidate> c;
    for (size_t i = 0; i < scaled.size(); ++i)
      if (scaled[i] >= peak - reach) c.push_back({scaled[i], (int)i});
    std::sort(c.begin(), c.end());
    if (c.size() == scaled.size()) {
      whole = 0;
      for (auto& x : c) whole += std::exp((double)x.value - peak);
    }
    keep = surviving(c, top_k, top_p, min_p, whole);
    bool cut_inside = keep < c.size() || (top_k > 0 && (size_t)top_k <= c.size()) || c.size() == scaled.size();
    if (cut_inside || rough || reach > kFar) return c;  // what is missing at last are scores that are no numbers
  }
  return {};
}

// Of candidates, by falling value or rising place, the place of the one whose value and noise are largest together.
int largest(const std::vector<Candidate>& c, size_t count, const int32_t* ids, const SampleInput& in, int row) {
  std::vector<int32_t> tokens(count);
  std::vector<float> noise(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = ids ? ids[c[i].token] : c[i].token;
  kernels().token_noise(tokens.data(), (int)count, noise_of(in, row), noise.data());
  float best = kNever;
  int token = c.empty() ? 0 : c[0].token;  // there are none where no score is a number
  for (size_t i = 0; i < count; ++i) {
    const float value = c[i].value + noise[i];
    if (value > best || (value == best && c[i].token < token)) {
      best = value;
      token = c[i].token;
    }
  }
  return token;
}

int draw_filtered(const std::vector<float>& x, const int32_t* ids, const SampleInput& in, int row) {
  std::vector<float> scaled(x);
  for (float& v : scaled) v /= in.temperature[row];
  if (ids && in.top_k[row] <= 0 && in.top_p[row] >= 1.0f && in.min_p[row] <= 0) {  // no filter: no order is needed
    float peak;
    int at;
    kernels().argmax(scaled.data(), (int)scaled.size(), &peak, &at);
    std::vector<Candidate> c;
    for (size_t i = 0; i < scaled.size(); ++i)
      if (scaled[i] >= peak - kFar) c.push_back({scaled[i], (int)i});
    return largest(c, c.size(), ids, in, row);
  }
  size_t keep = 0;
  auto c = candidates(scaled, in.top_k[row], in.top_p[row], in.min_p[row], ids != nullptr, keep);
  return largest(c, keep, ids, in, row);
}

// `drawn` is the place of the token that was drawn.
void log_probabilities(const float* logits, int vocabulary, const int32_t* ids, const SampleInput& in, int row, int drawn, SampleOutput& out) {
  float peak;
  int at;
  kernels().argmax(logits, vocabulary, &peak, &at);
  double log_sum = peak + std::log(kernels().sum_exp(logits, peak, vocabulary));
  int32_t* tokens = out.tokens + (size_t)row * out.width;
  float* values = out.logprobs + (size_t)row * out.width;
  values[0] = (float)(logits[drawn] - log_sum);
  int wanted = std::min(in.logprobs[row], vocabulary);
  if (!wanted) return;
  std::vector<Candidate> c(vocabulary);
  for (int i = 0; i < vocabulary; ++i) c[i] = {logits[i], i};
  std::partial_sort(c.begin(), c.begin() + wanted, c.end());
  for (int i = 0; i < wanted; ++i) {
    tokens[1 + i] = ids ? ids[c[i].token] : c[i].token;
    values[1 + i] = (float)(c[i].value - log_sum);
  }
}

}  // namespace

bool sliceable(const SampleInput& in, int row) {
  bool filtered = in.temperature[row] > 0 && (in.top_k[row] > 0 || in.top_p[row] < 1.0f || in.min_p[row] > 0);
  return !filtered && in.logprobs[row] < 0 && in.adjust_start[row] == in.adjust_start[row + 1] && in.mask_of[row] < 0;
}

void sample_slice(const float* logits, int first, int n, const SampleInput& in, int row, float* best, int* index) {
  if (in.temperature[row] > 0) {
    kernels().argmax_noise(logits + first, 1.0f / in.temperature[row], first, n, noise_of(in, row), best, index);
  } else {
    kernels().argmax(logits + first, n, best, index);
    *index += first;
  }
}

void sample_row(const float* logits, int vocabulary, const int32_t* ids, const SampleInput& in, int row, SampleOutput& out) {
  float best;
  int token;
  bool adjusted = in.adjust_start[row] != in.adjust_start[row + 1] || in.mask_of[row] >= 0;
  bool filtered = in.temperature[row] > 0 && (ids || in.top_k[row] > 0 || in.top_p[row] < 1.0f || in.min_p[row] > 0);
  std::vector<int> few;
  if (!filtered && in.mask_of[row] >= 0 && in.adjust_start[row] == in.adjust_start[row + 1]) few = allowed(vocabulary, in, row);
  if (!few.empty()) {
    token = draw_of_few(logits, few, ids, in, row);
  } else if (!adjusted && !filtered) {
    sample_slice(logits, 0, vocabulary, in, row, &best, &token);
  } else {
    std::vector<float> x(logits, logits + vocabulary);
    adjust(x, in, row);
    if (filtered) token = draw_filtered(x, ids, in, row);
    else sample_slice(x.data(), 0, vocabulary, in, row, &best, &token);
  }
  out.tokens[(size_t)row * out.width] = ids ? ids[token] : token;
  if (in.logprobs[row] >= 0) log_probabilities(logits, vocabulary, ids, in, row, token, out);
}

}  // namespace slip
