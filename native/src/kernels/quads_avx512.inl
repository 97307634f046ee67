// Packed weights as the bytes that VNNI and the unpacking for AMX tiles want.
namespace {

// The weights of inputs 4q..4q+3 of all 16 rows, unsigned; planes that several quads share are loaded once.
template <IntShape S> struct Quads {
  const uint8_t* p;
  __m512i packed, extra;
  __m512i operator()(int quad) {
    const __m512i nibble = _mm512_set1_epi8(15);
    if constexpr (S.bits == 8) return _mm512_xor_si512(_mm512_loadu_si512(p + quad * 64), _mm512_set1_epi8((char)0x80));
    if (quad % 2 == 0) packed = _mm512_loadu_si512(p + quad / 2 * 64);
    __m512i w = _mm512_and_si512(quad % 2 ? _mm512_srli_epi16(packed, 4) : packed, nibble);
    if constexpr (S.bits == 5) {
      if (quad == 0) extra = _mm512_loadu_si512(p + 256);
      __m512i bit = quad < 4 ? _mm512_slli_epi16(extra, 4 - quad) : _mm512_srli_epi16(extra, quad - 4);
      w = _mm512_or_si512(w, _mm512_and_si512(bit, _mm512_set1_epi8(16)));
    } else if constexpr (S.bits == 6) {
      if (quad % 4 == 0) extra = _mm512_loadu_si512(p + 256 + quad / 4 * 64);
      __m512i bits = quad % 4 < 2 ? _mm512_slli_epi16(extra, 4 - quad % 4 * 2) : _mm512_srli_epi16(extra, quad % 4 * 2 - 4);
      w = _mm512_or_si512(w, _mm512_and_si512(bits, _mm512_set1_epi8(48)));
    }
    return w;
  }
};

}  // namespace
