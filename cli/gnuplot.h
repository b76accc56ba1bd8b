// SPDX-License-Identifier: Apache-2.0
// What all pictures share. gnuplot (Debian: gnuplot-nox) runs as a subprocess, without a shell and without files on
// disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace distr::cli {

enum class PictureFormat : std::uint8_t { png, svg };

// The format that the extension of --plot's path names. Throws InputError unless it is .png or .svg.
[[nodiscard]] PictureFormat picture_format(const std::string& path);

// gnuplot's line "set terminal ..." for a picture of so many pixels.
[[nodiscard]] std::string terminal(PictureFormat format, double width, double height, int font_size);

// The quantile `share` of the values, where the colour range is cut; 0 if there are none.
[[nodiscard]] double percentile(std::vector<double> values, double share);

// Throws std::runtime_error that says which package to install if gnuplot cannot be run.
void require_gnuplot();

// Runs `script`, in which gnuplot's string variables with the names of `data` are paths of files with those values, and
// `picture` is the path to write to; returns what was written. Throws std::runtime_error with gnuplot's first message
// if it fails.
[[nodiscard]] std::vector<std::byte> run_gnuplot(const std::string& script,
                                                 const std::map<std::string, std::vector<double>>& data);

}  // namespace distr::cli
