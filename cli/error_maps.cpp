// SPDX-License-Identifier: Apache-2.0
#include "error_maps.h"

#include <algorithm>
#include <map>
#include <ostream>
#include <sstream>

#include "gnuplot.h"
#include "text.h"

namespace distr::cli {
namespace {

// Pixels. 64 rows get 4 x 4 whole pixels an entry.
constexpr double kPictureWidth = 1720, kPictureHeight = 720;
constexpr double kRowsSide = 256;
constexpr double kColumnStep = 290, kScoresLeft = 60, kErrorsLeft = 450;
constexpr double kRowTops[] = {70, 410};
constexpr double kErrorPercentile =
    0.99;  // the colours of the error are cut there: single entries would wash out all others

constexpr const char* kScorePalette =
    "set palette defined (0 '#0b0724', 1 '#3b0f70', 2 '#8c2981', 3 '#de4968', 4 '#fe9f6d', 5 '#fcfdbf')\n";
constexpr const char* kErrorPalette =
    "set palette defined (0 '#f7fbff', 1 '#c6dbef', 2 '#6baed6', 3 '#2171b5', 4 '#08306b', 5 '#041530')\n";

void write_map(std::ostream& script, std::int64_t rows, double left, double top, const std::string& data,
               const std::string& title) {
  script << "set lmargin at screen " << general(left / kPictureWidth, 9) << "\nset rmargin at screen "
         << general((left + kRowsSide) / kPictureWidth, 9) << "\nset tmargin at screen "
         << general(1 - top / kPictureHeight, 9) << "\nset bmargin at screen "
         << general(1 - (top + kRowsSide) / kPictureHeight, 9) << "\nset title \"" << title
         << "\" offset 0,-0.5\nset xrange [0:" << rows << "]\nset yrange [" << rows << ":0]\nplot " << data
         << " binary array=(" << rows << "," << rows
         << ") format='%float64' origin=(0.5,0.5) dx=1 dy=1 with image notitle\n";
}

// Beside maps whose right edge is at `left` - a gap, from the first row of maps to the last.
void set_colour_bar(std::ostream& script, double left, double low, double high, const std::string& label) {
  const double bottom = kRowTops[1] + kRowsSide;
  script << "set colorbox vertical user origin " << general(left / kPictureWidth, 9) << ","
         << general(1 - bottom / kPictureHeight, 9) << " size " << general(16 / kPictureWidth, 9) << ","
         << general((bottom - kRowTops[0]) / kPictureHeight, 9) << "\nset cbrange [" << general(low, 4) << ":"
         << general(high, 4) << "]\nset cblabel \"" << label << "\" offset 1.5\n";
}

void write_scores(std::ostream& script, const ErrorPicture& picture) {
  const auto [low, high] = std::minmax_element(picture.exact.begin(), picture.exact.end());
  script << kScorePalette << "set ylabel 'query' offset 1\n";
  set_colour_bar(script, kScoresLeft + kRowsSide + 12, *low, *high, "score");
  write_map(script, picture.rows, kScoresLeft, kRowTops[0], "exact", "S = Q K^T");
  script << "unset colorbox\nset xlabel 'key' offset 0,0.5\n";
  write_map(script, picture.rows, kScoresLeft, kRowTops[1], "approximate", picture.approximate_title);
}

std::string name_of_map(const char* sweep, std::size_t index) { return sweep + std::to_string(index); }

void write_errors(std::ostream& script, const ErrorPicture& picture) {
  std::vector<double> all;
  for (const auto* maps : {&picture.by_block, &picture.by_group}) {
    for (const ErrorMap& map : *maps) all.insert(all.end(), map.percent.begin(), map.percent.end());
  }
  const double high = percentile(all, kErrorPercentile);
  const double bar_left = kErrorsLeft + 3 * kColumnStep + kRowsSide + 12;
  script << kErrorPalette << "unset ylabel\nunset xlabel\nset format y ''\n";
  set_colour_bar(script, bar_left, 0, high > 0 ? high : 1,
                 "error of S\\\\_hat, % of S (cut at the 99th percentile of all eight maps)");
  for (std::size_t i = 0; i < picture.by_block.size(); ++i) {
    const double left = kErrorsLeft + static_cast<double>(i) * kColumnStep;
    write_map(script, picture.rows, left, kRowTops[0], name_of_map("block", i), picture.by_block[i].title);
    script << "unset colorbox\n";
  }
  script << "set xlabel 'key' offset 0,0.5\n";
  for (std::size_t i = 0; i < picture.by_group.size(); ++i) {
    const double left = kErrorsLeft + static_cast<double>(i) * kColumnStep;
    write_map(script, picture.rows, left, kRowTops[1], name_of_map("group", i), picture.by_group[i].title);
  }
}

}  // namespace

std::vector<std::byte> draw(const ErrorPicture& picture, PictureFormat format) {
  std::ostringstream script;
  script << terminal(format, kPictureWidth, kPictureHeight, 11)
         << "set output picture\nset encoding utf8\nset multiplot\nunset key\nset tics out nomirror\nset xtics 16\n"
         << "set ytics 16\n";
  write_scores(script, picture);
  write_errors(script, picture);
  script << "unset multiplot\nset output\n";
  std::map<std::string, std::vector<double>> data = {{"exact", picture.exact}, {"approximate", picture.approximate}};
  for (std::size_t i = 0; i < picture.by_block.size(); ++i) data[name_of_map("block", i)] = picture.by_block[i].percent;
  for (std::size_t i = 0; i < picture.by_group.size(); ++i) data[name_of_map("group", i)] = picture.by_group[i].percent;
  return run_gnuplot(script.str(), data);
}

}  // namespace distr::cli
