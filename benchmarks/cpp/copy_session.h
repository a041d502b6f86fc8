// Cases of copying, each in turn with a bare loop of cudaMemcpyAsync: the ceiling.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "copy_station.h"
#include "table.h"

namespace megatrain::bench {

struct CopySizes {
  explicit CopySizes(bool quick);
  std::size_t largest, medium;
  int rounds;
};

class CopySession {
 public:
  CopySession(Station& station, const CopySizes& sizes);

  // A row a case. Verifies, then runs every case and the bare loop in every round.
  Table measure(const std::string& title, const char* first_column, const std::vector<Case>& cases);

  Station& station() noexcept { return station_; }
  Verifier& verifier() noexcept { return verifier_; }
  const CopySizes& sizes() const noexcept { return sizes_; }
  const Case& bare() const noexcept { return bare_; }

 private:
  Station& station_;
  const CopySizes sizes_;
  Verifier verifier_;
  CudaHostMemory bare_source_, bare_target_;
  Case bare_;
};

}  // namespace megatrain::bench
