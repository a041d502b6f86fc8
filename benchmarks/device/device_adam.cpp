// AdamW on the GPU in every precision mode against a copy within its memory, in the same run and in
// turn: bytes that an update reads and writes a second, as a share of those of cudaMemcpy.
//
//   device_adam [millions of parameters, 256 by default] [device, 0 by default]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "device/cuda_check.h"
#include "kernels/device_adamw.h"

namespace megatrain {
namespace {

constexpr int kRepeats = 20, kWarmUps = 3;

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) {
    check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc");
    check_cuda(cudaMemset(data_, 0, bytes), "cudaMemset");
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { cudaFree(data_); }
  template <class T>
  T* at(std::size_t bytes) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + bytes);
  }

 private:
  void* data_ = nullptr;
};

class Timer {
 public:
  Timer() {
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  template <class Work>
  double seconds(const Work& work) {
    check_cuda(cudaEventRecord(begin_), "cudaEventRecord");
    work();
    check_cuda(cudaEventRecord(end_), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return ms / 1e3;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Gradients and weights of ordinary size: arithmetic on zeros may be faster.
std::vector<std::uint16_t> pattern(std::size_t count) {
  std::vector<std::uint16_t> values(count);
  std::uint32_t state = 1;
  for (std::uint16_t& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<std::uint16_t>((state >> 16 & 0x807f) | 0x3c00);  // +-0.0078 to 0.0156 as bf16
  }
  return values;
}

void measure(std::int64_t count, int device) {
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::printf("%s, %lld parameters, median of %d\n", properties.name, static_cast<long long>(count),
              kRepeats);
  const auto n = static_cast<std::size_t>(count);
  const std::size_t copied = 12 * n;  // weights, gradients and the low half
  const DeviceMemory memory(21 * n), other(copied);
  int* const flag = memory.at<int>(20 * n + n / 2);
  const auto values = pattern(n);
  const auto fill = [&](std::size_t at) {
    check_cuda(cudaMemcpy(memory.at<void>(at), values.data(), 2 * n, cudaMemcpyHostToDevice), "cudaMemcpy");
  };
  Timer timer;
  constexpr const char* kWeightNames[] = {"split", "bf16", "fp32"};
  constexpr const char* kMomentNames[] = {"fp32", "bf16", "int8"};
  std::printf("%-6s %-6s %8s %10s %10s %10s %7s\n", "weight", "moment", "B/param", "Gparam/s", "GB/s",
              "copy GB/s", "share");
  for (const auto weights : {WeightFormat::kBf16Split, WeightFormat::kBf16, WeightFormat::kFp32}) {
    for (const auto moments : {MomentFormat::kFp32, MomentFormat::kBf16, MomentFormat::kInt8}) {
      check_cuda(cudaMemset(memory.at<void>(0), 0, 21 * n), "cudaMemset");
      fill(0), fill(2 * n), fill(4 * n), fill(6 * n);
      const UpdateSpan span{.weight_format = weights,
                            .moment_format = moments,
                            .weight = memory.at<void>(0),
                            .low = memory.at<std::int16_t>(8 * n),
                            .gradient = memory.at<void>(4 * n),
                            .exp_avg = memory.at<void>(12 * n),
                            .exp_avg_sq = memory.at<void>(16 * n),
                            .exp_avg_exponents = memory.at<std::uint8_t>(20 * n),
                            .exp_avg_sq_exponents = memory.at<std::uint8_t>(20 * n + n / 4),
                            .count = count};
      UpdateStep step{.lr = 1e-6};
      std::vector<double> updates, copies;
      const std::int64_t bytes = update_bytes(weights, moments, count);
      for (int i = 0; i < kWarmUps + kRepeats; ++i) {
        const double update = timer.seconds([&] { queue_adamw(step, span, flag, 0); });
        const double copy = timer.seconds([&] {
          check_cuda(cudaMemcpyAsync(other.at<void>(0), memory.at<void>(0), copied, cudaMemcpyDeviceToDevice,
                                     nullptr),
                     "cudaMemcpyAsync");
        });
        ++step.step;
        if (i < kWarmUps) continue;
        updates.push_back(update);
        copies.push_back(copy);
      }
      const double update_rate = static_cast<double>(bytes) / median(updates) / 1e9;
      // A byte that is copied is read and written.
      const double copy_rate = 2.0 * static_cast<double>(copied) / median(copies) / 1e9;
      std::printf("%-6s %-6s %8.2f %10.1f %10.0f %10.0f %6.1f%%\n", kWeightNames[static_cast<int>(weights)],
                  kMomentNames[static_cast<int>(moments)],
                  static_cast<double>(bytes) / static_cast<double>(n),
                  static_cast<double>(n) / median(updates) / 1e9, update_rate, copy_rate,
                  100 * update_rate / copy_rate);
    }
  }
  int non_finite = 0;
  check_cuda(cudaMemcpy(&non_finite, flag, sizeof non_finite, cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (non_finite != 0) std::printf("a weight became infinite or NaN\n");
}

}  // namespace
}  // namespace megatrain

int main(int argc, char** argv) {
  const long millions = argc > 1 ? std::strtol(argv[1], nullptr, 10) : 256;
  const long device = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 0;
  if (millions < 1 || device < 0) {
    std::fprintf(stderr, "device_adam [millions of parameters] [device]\n");
    return 2;
  }
  try {
    megatrain::measure((millions << 20), static_cast<int>(device));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
