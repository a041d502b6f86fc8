// Parameter sizes of one Qwen2.5 layer, in the order in which the model registers them.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"

namespace megatrain::bench {

struct QwenShape {
  std::int64_t hidden, intermediate, key_value;
};

inline QwenShape qwen_shape(const std::string& model) {
  if (model == "0.5b") return {896, 4864, 128};
  if (model == "1.5b") return {1536, 8960, 256};
  if (model == "3b") return {2048, 11008, 256};
  if (model == "7b") return {3584, 18944, 512};
  if (model == "14b") return {5120, 13824, 1024};
  throw CallerError("unknown model \"" + model + "\"; known: 0.5b, 1.5b, 3b, 7b, 14b");
}

inline std::vector<std::int64_t> qwen_layer(const std::string& model) {
  const auto [h, i, kv] = qwen_shape(model);
  return {h * h, h,     kv * h, kv, kv * h, kv, h * h,  // q, k, v with biases, o
          i * h, i * h, h * i,  h,  h};                 // gate, up, down, two norms
}

inline std::int64_t qwen_layer_elements(const std::string& model) {
  const std::vector<std::int64_t> sizes = qwen_layer(model);
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

}  // namespace megatrain::bench
