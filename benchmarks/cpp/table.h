// One table, shown on the screen and kept for the JSON file.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "json.h"
#include "statistics.h"

namespace megatrain::bench {

struct Column {
  const char* title;
  const char* key;  // in the JSON
};

// What a cell shows, and its value for the JSON.
struct Cell {
  Cell(const char* word) : shown(word), value(word) {}
  Cell(const std::string& word) : shown(word), value(word) {}
  Cell(std::integral auto number) : shown(std::to_string(number)), value(number) {}
  Cell(std::string shown, Json value) : shown(std::move(shown)), value(std::move(value)) {}
  std::string shown;
  Json value;
};

Cell number(double value, int decimals = 1);
Cell spread(const Spread& value, int decimals = 1);  // "55.4 (55.1-55.5)"
Cell share(double ratio);                            // "98.7 %"; in the JSON the ratio
Cell none();                                         // "-", null
std::string bytes_text(double bytes);                // "64 KiB"

class Table {
 public:
  Table(std::string title, std::vector<Column> columns)
      : title_(std::move(title)), columns_(std::move(columns)) {}

  // A cell for each column, in their order.
  void add(std::vector<Cell> row) { rows_.push_back(std::move(row)); }
  void print() const;
  Json json() const;  // an array of objects

 private:
  std::string title_;
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace megatrain::bench
