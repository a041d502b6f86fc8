// Samples and what is reported of them: the median, with the smallest and the largest beside it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace megatrain::bench {

struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
};

inline Spread spread_of(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::sort(samples.begin(), samples.end());
  const std::size_t middle = samples.size() / 2;
  const bool even = samples.size() % 2 == 0;
  return {even ? (samples[middle - 1] + samples[middle]) / 2 : samples[middle], samples.front(),
          samples.back()};
}

// Both were sampled in the same rounds. The ratio of a round compares neighbours in time: a machine
// that changes its speed between two rounds then moves both.
inline double median_ratio(const std::vector<double>& samples, const std::vector<double>& references) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(samples.size(), references.size()); ++i) {
    ratios.push_back(samples[i] / references[i]);
  }
  return spread_of(std::move(ratios)).median;
}

}  // namespace megatrain::bench
