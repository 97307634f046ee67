// What followed the longest match of a context: tokens in a ring, found through chains of equal n-grams.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace slip {

// Answers what a suffix tree answers (where did the longest suffix of this context occur before, and what came next, how
// often?) in 12 to 20 bytes a token: the chains of a Lempel-Ziv compressor in place of a tree. The oldest tokens go first.
class SuffixIndex {
 public:
  static constexpr int kMostMatch = 64;   // a match is not followed further back
  static constexpr int kCandidates = 32;  // occurrences that are looked at, the latest first
  static constexpr int32_t kBoundary = -1;

  struct Proposal {
    std::vector<int32_t> tokens;
    std::vector<int32_t> matched;  // per token: tokens before it that agree with the context, the proposed ones included
    std::vector<float> share;      // per token: of the occurrences that agree so far, the share that goes on with it
  };

  // Keeps `capacity` tokens; a match has `least` tokens at least.
  SuffixIndex(int capacity, int least);
  void append(const int32_t* tokens, int count);
  // What is proposed after `context`, at most `most` tokens.
  Proposal propose(const int32_t* context, int count, int most) const;
  // The last tokens, kMostMatch at most, oldest first; returns how many.
  int tail(int32_t* out) const;
  int size() const { return (int)(end_ < capacity_ ? end_ : capacity_); }
  int64_t appended() const { return end_; }
  size_t bytes() const { return (tokens_.size() + before_.size() + heads_.size() * 2) * sizeof(int32_t); }

 private:
  int32_t at(int64_t position) const { return tokens_[position % capacity_]; }
  bool kept(int64_t position) const { return position >= 0 && position >= end_ - capacity_ && position < end_; }
  uint32_t hash(const int32_t* gram) const;
  void grow();
  void link(int64_t position);
  // How many tokens before `position` agree with the end of the context.
  int matched(int64_t position, const int32_t* context, int count) const;

  int64_t capacity_, end_ = 0;
  int least_;
  std::vector<int32_t> tokens_;   // ring
  std::vector<int32_t> before_;   // ring: distance back to the n-gram's occurrence before; 0: none
  std::vector<int64_t> heads_;    // by hash: position + 1 after the n-gram's last occurrence; 0: none
};

}  // namespace slip
