// Sampling: adjust, filter, add noise, take the largest.
#pragma once
#include <cstdint>
#include <vector>

#include "pool.hpp"

namespace slip {

// Settings of the rows to draw for; arrays are [rows]. `adjust` is in CSR form.
struct SampleInput {
  int rows;
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *choice, *position, *stream, *logprobs;
  const uint64_t* seed;
  const int32_t *adjust_start, *adjust_token;
  const float *adjust_mul, *adjust_add;
  const int32_t* mask_of;  // the row's mask, or -1: all tokens are allowed
  const uint32_t* masks;   // [masks][mask_words], a bit for a token; tokens after the last word are not allowed
  int mask_words;
};

// Outcomes, [rows][width]: column 0 is the token drawn, the others are the likeliest.
struct SampleOutput {
  int width;
  int32_t* tokens;
  float* logprobs;
};

// Draw row `row` from logits [vocabulary]; called by one thread. With `ids` the logits are those of these tokens only;
// adjusted and masked tokens are given by place, drawn ones by token. Tokens too unlikely to matter for a draft are left out.
void sample_row(const float* logits, int vocabulary, const int32_t* ids, const SampleInput& in, int row, SampleOutput& out);
// Whether a row can be drawn in slices of the vocabulary: no filter, no adjustment, no log-probabilities.
bool sliceable(const SampleInput& in, int row);
void sample_slice(const float* logits, int first, int n, const SampleInput& in, int row, float* best, int* index);

}  // namespace slip
