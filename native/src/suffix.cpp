// What followed the longest match of a context: tokens in a ring, found through chains of equal n-grams.
#include "suffix.hpp"

#include <algorithm>
#include <stdexcept>

namespace slip {
namespace {

constexpr int kSame = 16;  // matches of so many tokens and more count alike

}  // namespace

SuffixIndex::SuffixIndex(int capacity, int least) : capacity_(capacity), least_(least) {
  if (capacity < 1 || least < 1 || least > kMostMatch) throw std::invalid_argument("an index keeps tokens and matches at least one");
  heads_.resize(64);
}

uint32_t SuffixIndex::hash(const int32_t* gram) const {
  uint64_t h = 0;
  for (int i = 0; i < least_; ++i) h = (h ^ (uint32_t)gram[i]) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
  return (uint32_t)(h >> 16) & (uint32_t)(heads_.size() - 1);
}

// A position is that of the token after an n-gram: link it to the occurrence before.
void SuffixIndex::link(int64_t position) {
  int32_t gram[kMostMatch];
  if (position - least_ < 0 || !kept(position - least_)) return;
  for (int i = 0; i < least_; ++i) {
    gram[i] = at(position - least_ + i);
    if (gram[i] == kBoundary) return;
  }
  int64_t& head = heads_[hash(gram)];
  const int64_t distance = head ? position - (head - 1) : 0;
  before_[position % capacity_] = distance < capacity_ ? (int32_t)distance : 0;
  head = position + 1;
}

// Twice as many heads, and all chains anew.
void SuffixIndex::grow() {
  heads_.assign(heads_.size() * 2, 0);
  std::fill(before_.begin(), before_.end(), 0);
  for (int64_t p = std::max<int64_t>(end_ - capacity_, 0) + least_; p < end_; ++p) link(p);
}

void SuffixIndex::append(const int32_t* tokens, int count) {
  for (int i = 0; i < count; ++i) {
    if (end_ < capacity_) {
      tokens_.push_back(tokens[i]);
      before_.push_back(0);
    } else {
      tokens_[end_ % capacity_] = tokens[i];
      before_[end_ % capacity_] = 0;
    }
    ++end_;
    link(end_ - 1);  // now that the token is there, what came before it can be found to be followed by it
    if ((size_t)size() > heads_.size()) grow();
  }
}

int SuffixIndex::tail(int32_t* out) const {
  const int count = std::min(size(), kMostMatch);
  for (int i = 0; i < count; ++i) out[i] = at(end_ - count + i);
  return count;
}

int SuffixIndex::matched(int64_t position, const int32_t* context, int count) const {
  int length = 0;
  while (length < count && length < kMostMatch && kept(position - 1 - length) && at(position - 1 - length) == context[count - 1 - length]) ++length;
  return length;
}

SuffixIndex::Proposal SuffixIndex::propose(const int32_t* context, int count, int most) const {
  Proposal out;
  if (count < least_ || end_ == 0) return out;
  int64_t alive[kCandidates];
  int lengths[kCandidates], found = 0, best = 0;
  int64_t position = heads_[hash(context + count - least_)] - 1;
  for (int looked = 0; looked < kCandidates && kept(position); ++looked) {
    const int length = std::min(matched(position, context, count), kSame);
    if (length >= least_) {
      alive[found] = position;
      lengths[found++] = length;
      best = std::max(best, length);
    }
    const int32_t back = before_[position % capacity_];
    if (!back) break;
    position -= back;
  }
  int going = 0, longest = 0;
  for (int i = 0; i < found; ++i)
    if (lengths[i] == best) alive[going++] = alive[i];
  for (int i = 0; i < going; ++i) longest = std::max(longest, matched(alive[i], context, count));
  while (going && (int)out.tokens.size() < most) {
    const int depth = (int)out.tokens.size();
    int votes = 0;
    int32_t token = kBoundary;
    for (int i = 0; i < going; ++i) {  // the latest occurrence comes first and wins a tie
      if (!kept(alive[i] + depth)) continue;
      const int32_t candidate = at(alive[i] + depth);
      if (candidate == kBoundary) continue;
      int same = 0;
      for (int j = 0; j < going; ++j) same += kept(alive[j] + depth) && at(alive[j] + depth) == candidate;
      if (same > votes) votes = same, token = candidate;
    }
    if (!votes) break;
    out.tokens.push_back(token);
    out.matched.push_back(longest + depth);
    out.share.push_back((float)votes / (float)going);
    int still = 0;
    for (int i = 0; i < going; ++i)
      if (kept(alive[i] + depth) && at(alive[i] + depth) == token) alive[still++] = alive[i];
    going = still;
  }
  return out;
}

}  // namespace slip
