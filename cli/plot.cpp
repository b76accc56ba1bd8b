// SPDX-License-Identifier: Apache-2.0
#include "plot.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "gnuplot.h"
#include "text.h"

namespace distr::cli {
namespace {

// Pixels. A heat map of 128 x 128 gets 3 x 3 whole pixels an entry: other sizes would drop or widen single columns.
constexpr double kWidth = 1200, kHeight = 1020;
constexpr double kMapSide = 384;
constexpr double kKeyLine = 19;
constexpr double kPercentile = 0.995;  // the colours of P are cut there: single entries would wash out all others
constexpr double kDifferencePercentile = 0.98;  // likewise of the difference, most of which is near 0
constexpr std::size_t kKeyColumns = 2;
constexpr double kDecades = 4;  // of the colours of P, at most

constexpr const char* kSequential =
    "set palette defined (0 '#0b0724', 1 '#3b0f70', 2 '#8c2981', 3 '#de4968', 4 '#fe9f6d', 5 '#fcfdbf')\n";
constexpr const char* kDiverging =
    "set palette defined (-2 '#2166ac', -1 '#92c5de', 0 '#f7f7f7', 1 '#f4a582', 2 '#b2182b')\n";
constexpr const char* kExactColour = "#000000";
// Okabe and Ito's palette, which the colour-blind can tell apart, and two more.
constexpr const char* kSeriesColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                          "#e69f00", "#56b4e9", "#7a4a2b", "#8c8c8c"};
constexpr int kExactShape = 3;  // gnuplot's numbers: a star, then filled shapes
constexpr int kSeriesShapes[] = {7, 5, 9, 11, 13, 15};

struct Range {
  double low, high;
};

// Of the logarithmic colours of P: from the lowest visible entries to nearly the highest.
Range probability_range(const std::vector<double>& exact) {
  std::vector<double> positive;
  std::copy_if(exact.begin(), exact.end(), std::back_inserter(positive), [](double value) { return value > 0; });
  double high = percentile(positive, kPercentile);
  if (!(high > 0)) high = 1;
  const double low = std::max(percentile(positive, 1 - kPercentile), high * std::pow(10, -kDecades));
  return {std::min(low, high / 10), high};
}

// A rectangle of axes in pixels from the left and from the top.
struct Panel {
  double left, top, width, height;
};

void write_margins(std::ostream& script, const Panel& panel) {
  script << "set lmargin at screen " << general(panel.left / kWidth, 9) << "\nset rmargin at screen "
         << general((panel.left + panel.width) / kWidth, 9) << "\nset tmargin at screen "
         << general(1 - panel.top / kHeight, 9) << "\nset bmargin at screen "
         << general(1 - (panel.top + panel.height) / kHeight, 9) << "\n";
}

// With square entries, unless P is so long that they could not be seen.
Panel map_panel(const Picture& picture, double left, double top) {
  constexpr double kLongest = 3;
  const double shape = static_cast<double>(picture.seq_q) / static_cast<double>(picture.seq_k);
  if (shape > kLongest || shape < 1 / kLongest) return {left, top, kMapSide, kMapSide};
  return {left, top, std::round(kMapSide * std::min(1.0, 1 / shape)), std::round(kMapSide * std::min(1.0, shape))};
}

void write_heatmap(std::ostream& script, const Picture& picture, const Panel& panel, const char* data,
                   const std::string& title) {
  write_margins(script, panel);
  const double step_x = static_cast<double>(picture.seq_k) / static_cast<double>(picture.columns);
  const double step_y = static_cast<double>(picture.seq_q) / static_cast<double>(picture.rows);
  script << "set title \"" << title << "\"\n"
         << "set xrange [0:" << picture.seq_k << "]\n"
         << "set yrange [" << picture.seq_q << ":0]\n"
         << "plot " << data << " binary array=(" << picture.columns << "," << picture.rows
         << ") format='%float64' origin=(" << general(step_x / 2, 9) << "," << general(step_y / 2, 9)
         << ") dx=" << general(step_x, 9) << " dy=" << general(step_y, 9) << " with image notitle\n";
}

void write_heatmaps(std::ostream& script, const Picture& picture, Range range, double largest_difference) {
  const std::string colours = "log colours, cut at the 99.5th percentile";
  const bool whole = picture.rows == picture.seq_q && picture.columns == picture.seq_k;
  const std::string entries = whole ? "" : "means of blocks; ";
  script << "set xlabel 'key'\nset ylabel 'query'\nunset key\nset tics out nomirror\n"
         << kSequential << "set logscale cb\nset cbrange [" << general(range.low, 3) << ":" << general(range.high, 3)
         << "]\nset format cb '10^{%L}'\n";
  write_heatmap(script, picture, map_panel(picture, 90, 62), "exact",
                "P exact, " + picture.head + "\\n{/*0.8 " + entries + colours + "}");
  write_heatmap(script, picture, map_panel(picture, 690, 62), "approximate",
                "P by " + picture.setting + "\\n{/*0.8 the same colours}");
  script << kDiverging << "unset logscale cb\nset cbrange [" << general(-largest_difference, 3) << ":"
         << general(largest_difference, 3) << "]\nset format cb '%g'\n";
  write_heatmap(script, picture, map_panel(picture, 90, 574), "difference",
                "Difference, approximate - exact\\n{/*0.8 linear colours, cut at the 98th percentile}");
}

struct Box {
  double left, bottom, right, top;

  [[nodiscard]] bool overlaps(const Box& other) const {
    return left < other.right && other.left < right && bottom < other.top && other.bottom < top;
  }
};

struct Axes {
  Panel panel;
  Range x, y;
};

// Room for labels on all sides; errors start at 0, where exact attention is.
Axes axes_of(const std::vector<PlotPoint>& points, const Panel& panel) {
  const auto by_time = [](const PlotPoint& a, const PlotPoint& b) { return a.milliseconds < b.milliseconds; };
  const auto by_error = [](const PlotPoint& a, const PlotPoint& b) { return a.error < b.error; };
  const auto [first, last] = std::minmax_element(points.begin(), points.end(), by_time);
  const double worst = std::max_element(points.begin(), points.end(), by_error)->error;
  const double width = std::max(last->milliseconds - first->milliseconds, 0.1 * last->milliseconds);
  const double height = worst > 0 ? worst : 1;
  return {
      panel, {first->milliseconds - 0.15 * width, last->milliseconds + 0.2 * width}, {-0.08 * height, 1.12 * height}};
}

// The size of text and points in pixels, about.
constexpr double kCharacterWidth = 9.8, kLineHeight = 14, kGap = 8, kMarkerRadius = 5;

struct Pixel {
  double x, y;
};

// From the lower left corner of the axes.
Pixel pixel_of(const PlotPoint& point, const Axes& axes) {
  return {(point.milliseconds - axes.x.low) / (axes.x.high - axes.x.low) * axes.panel.width,
          (point.error - axes.y.low) / (axes.y.high - axes.y.low) * axes.panel.height};
}

// What labels should not cover: the points, and the lines between points of one series.
std::vector<Box> obstacles(const std::vector<PlotPoint>& points, const Axes& axes) {
  constexpr int kSteps = 24;
  std::vector<Box> boxes;
  const auto add = [&boxes](Pixel at, double radius) {
    boxes.push_back({at.x - radius, at.y - radius, at.x + radius, at.y + radius});
  };
  for (std::size_t i = 0; i < points.size(); ++i) {
    const Pixel end = pixel_of(points[i], axes);
    add(end, kMarkerRadius);
    if (i == 0 || points[i - 1].series != points[i].series) continue;
    const Pixel start = pixel_of(points[i - 1], axes);
    for (int step = 1; step < kSteps; ++step) {
      const double share = static_cast<double>(step) / kSteps;
      add({start.x + share * (end.x - start.x), start.y + share * (end.y - start.y)}, 1);
    }
  }
  return boxes;
}

// Places around a point for a label of that width, the best first.
std::vector<Box> label_places(Pixel at, double width) {
  std::vector<Box> places;
  for (const double distance : {1.0, 2.0, 3.0, 4.0}) {
    const double gap = kGap * distance;
    const double left = at.x - gap - width, right = at.x + gap, centre = at.x - width / 2;
    const double below = at.y - gap - kLineHeight, above = at.y + gap, middle = at.y - kLineHeight / 2;
    for (const Pixel& corner : {Pixel{right, middle}, Pixel{left, middle}, Pixel{centre, above}, Pixel{centre, below},
                                Pixel{right, above}, Pixel{left, below}, Pixel{left, above}, Pixel{right, below}}) {
      places.push_back({corner.x, corner.y, corner.x + width, corner.y + kLineHeight});
    }
  }
  return places;
}

std::vector<std::string> series_of(const std::vector<PlotPoint>& points) {
  std::vector<std::string> series;
  for (const PlotPoint& point : points) {
    if (std::find(series.begin(), series.end(), point.series) == series.end()) series.push_back(point.series);
  }
  return series;
}

const char* colour_of(std::size_t series) {
  return series == 0 ? kExactColour : kSeriesColours[(series - 1) % std::size(kSeriesColours)];
}

int shape_of(std::size_t series) {
  return series == 0 ? kExactShape : kSeriesShapes[(series - 1) % std::size(kSeriesShapes)];
}

// Puts each label beside its point where it meets no point, line or other label, if there is such a place.
void write_labels(std::ostream& script, const std::vector<PlotPoint>& points, const Axes& axes) {
  const std::vector<std::string> series = series_of(points);
  std::vector<Box> taken = obstacles(points, axes);
  for (const PlotPoint& point : points) {
    const double width = kCharacterWidth * static_cast<double>(point.label.size());
    const std::vector<Box> places = label_places(pixel_of(point, axes), width);
    auto chosen = std::find_if(places.begin(), places.end(), [&](const Box& box) {
      const bool inside =
          box.left >= 0 && box.right <= axes.panel.width && box.bottom >= 0 && box.top <= axes.panel.height;
      return inside && std::none_of(taken.begin(), taken.end(), [&](const Box& other) { return box.overlaps(other); });
    });
    if (chosen == places.end()) chosen = places.begin();
    taken.push_back(*chosen);
    const auto index = std::find(series.begin(), series.end(), point.series) - series.begin();
    script << "set label \"" << point.label << "\" at graph " << general(chosen->left / axes.panel.width, 6)
           << ",graph " << general((chosen->bottom + chosen->top) / 2 / axes.panel.height, 6)
           << " left font ',10' tc rgb '" << colour_of(static_cast<std::size_t>(index)) << "' front\n";
  }
}

void write_error_panel(std::ostream& script, const Picture& picture) {
  const std::vector<std::string> series = series_of(picture.points);
  const std::size_t key_rows = (series.size() + kKeyColumns - 1) / kKeyColumns;
  const double key_height = kKeyLine * static_cast<double>(key_rows);
  const Panel panel{690, 574, 480, kMapSide - key_height - 4};
  const Axes axes = axes_of(picture.points, panel);
  write_margins(script, panel);
  script << "set title \"" << picture.error_title << "\"\n"
         << "set xlabel 'time (ms, median)'\nset ylabel 'relative error of O'\nset grid lt 1 lc rgb '#dddddd'\n"
         << "set format y '%g'\nset key center bottom at screen " << general((panel.left + panel.width / 2) / kWidth, 6)
         << ",screen 0.004 horizontal Left reverse samplen 2"
         << " maxcols " << kKeyColumns << "\n"
         << "set xrange [" << general(axes.x.low, 9) << ":" << general(axes.x.high, 9) << "]\n"
         << "set yrange [" << general(axes.y.low, 9) << ":" << general(axes.y.high, 9) << "]\n";
  write_labels(script, picture.points, axes);
  for (std::size_t i = 0; i < series.size(); ++i) {
    script << "$series" << i << " << END\n";
    for (const PlotPoint& point : picture.points) {
      if (point.series != series[i]) continue;
      script << general(point.milliseconds, 9) << " " << general(point.error, 9) << "\n";
    }
    script << "END\n";
  }
  script << "plot ";
  for (std::size_t i = 0; i < series.size(); ++i) {
    script << (i == 0 ? "" : ", ") << "$series" << i << " with linespoints lw 1.5 ps 1.4 pt " << shape_of(i)
           << " lc rgb '" << colour_of(i) << "' title \"" << series[i] << "\"";
  }
  script << "\n";
}

}  // namespace

std::vector<std::byte> draw(const Picture& picture, PictureFormat format) {
  const Range range = probability_range(picture.exact);
  const auto floored = [&](std::vector<double> values) {  // zero has no logarithm: it gets the lowest colour
    for (double& value : values) value = std::max(value, range.low);
    return values;
  };
  std::vector<double> difference(picture.exact.size());
  std::vector<double> sizes;
  for (std::size_t i = 0; i < difference.size(); ++i) {
    difference[i] = picture.approximate[i] - picture.exact[i];
    if (std::isfinite(difference[i])) sizes.push_back(std::fabs(difference[i]));
  }
  double largest = percentile(sizes, kDifferencePercentile);
  if (!(largest > 0)) largest = 1;

  std::ostringstream script;
  script << terminal(format, kWidth, kHeight, 11) << "set output picture\nset encoding utf8\nset multiplot\n";
  write_heatmaps(script, picture, range, largest);
  write_error_panel(script, picture);
  script << "unset multiplot\nset output\n";
  return run_gnuplot(
      script.str(),
      {{"exact", floored(picture.exact)}, {"approximate", floored(picture.approximate)}, {"difference", difference}});
}

}  // namespace distr::cli
