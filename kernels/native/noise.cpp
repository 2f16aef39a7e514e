// The uniforms behind the Gumbel noise: Philox4x32-10 (Salmon et al., SC'11). Reference: kernels/philox.py, whose bits
// these are. A library of its own, because it knows neither number formats nor models.
#include <algorithm>
#include <cstdint>

#include "threads.h"

namespace gilir {

constexpr int64_t PIECE = 1 << 12;  // numbers that a thread takes at once

// Word 0 of philox(key, (token, position, 0, 0)) as a number inside (0, 1).
inline float uniform(uint32_t key_0, uint32_t key_1, uint32_t token, uint32_t position) {
  uint32_t c0 = token, c1 = position, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; round++) {
    const uint64_t first = static_cast<uint64_t>(c0) * 0xD2511F53u, second = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ key_0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ key_1;
    c3 = static_cast<uint32_t>(first);
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return (static_cast<float>(static_cast<int32_t>(c0 >> 9)) + 0.5f) * (1.0f / 8388608.0f);
}

// tokens: [rows, width], or null: each row has the tokens 0 .. width - 1. out: [rows, width].
void uniforms(const uint64_t* seeds, const int64_t* positions, const int64_t* tokens, int64_t width, int64_t begin,
              int64_t end, float* out) {
  while (begin < end) {
    const int64_t row = begin / width, last = std::min(end, (row + 1) * width), first = begin % width;
    const uint32_t key_0 = static_cast<uint32_t>(seeds[row]), key_1 = static_cast<uint32_t>(seeds[row] >> 32);
    const uint32_t position = static_cast<uint32_t>(positions[row]);
    const int64_t count = last - begin;
    float* target = out + begin;
    if (tokens == nullptr)
      for (int64_t i = 0; i < count; i++) target[i] = uniform(key_0, key_1, static_cast<uint32_t>(first + i), position);
    else
      for (int64_t i = 0; i < count; i++) target[i] = uniform(key_0, key_1, static_cast<uint32_t>(tokens[begin + i]), position);
    begin = last;
  }
}

}  // namespace gilir

extern "C" __attribute__((visibility("default"))) int gilir_uniforms(const uint64_t* seeds, const int64_t* positions, const int64_t* tokens,
                                                                     int64_t rows, int64_t width, float* out, int32_t threads) try {
  using namespace gilir;
  const int64_t count = rows * width, pieces = (count + PIECE - 1) / PIECE;
  const int used = static_cast<int>(std::min<int64_t>(threads, pieces));
  Pool::instance().run(std::max(used, 1), [&](int thread) {
    const Share share(pieces, thread, std::max(used, 1));
    uniforms(seeds, positions, tokens, width, share.begin * PIECE, std::min(share.end * PIECE, count), out);
  });
  return 0;
} catch (...) {
  return 1;
}
