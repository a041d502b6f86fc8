#include "table.h"

#include <algorithm>
#include <cassert>
#include <cstdio>

namespace megatrain::bench {
namespace {

std::string fixed(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

}  // namespace

Cell number(double value, int decimals) { return {fixed(value, decimals), Json(value)}; }

Cell spread(const Spread& value, int decimals) {
  Json json = Json::object();
  json.set("median", value.median).set("min", value.min).set("max", value.max);
  return {fixed(value.median, decimals) + " (" + fixed(value.min, decimals) + "-" +
              fixed(value.max, decimals) + ")",
          std::move(json)};
}

Cell share(double ratio) { return {fixed(100 * ratio, 1) + " %", Json(ratio)}; }

Cell none() { return {"-", Json()}; }

std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 3; bytes /= 1024) ++unit;
  return fixed(bytes, bytes == static_cast<double>(static_cast<long>(bytes)) ? 0 : 1) + " " + units[unit];
}

void Table::print() const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(std::string(column.title).size());
  for (const auto& row : rows_) {
    assert(row.size() == columns_.size());
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].shown.size());
  }
  // The first column names the row and is flush left; the others are read against each other.
  const auto print_cell = [&](std::size_t i, const std::string& text) {
    const int width = static_cast<int>(widths[i]);
    std::printf("%s%*s", i == 0 ? "" : "  ", i == 0 ? -width : width, text.c_str());
  };
  std::printf("\n%s\n", title_.c_str());
  for (std::size_t i = 0; i < columns_.size(); ++i) print_cell(i, columns_[i].title);
  std::printf("\n");
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) print_cell(i, row[i].shown);
    std::printf("\n");
  }
  std::fflush(stdout);
}

Json Table::json() const {
  Json rows = Json::array();
  for (const auto& row : rows_) {
    Json object = Json::object();
    for (std::size_t i = 0; i < row.size(); ++i) object.set(columns_[i].key, row[i].value);
    rows.push(std::move(object));
  }
  return rows;
}

}  // namespace megatrain::bench
