// SPDX-License-Identifier: Apache-2.0
// Output files that appear whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace distr::cli {

// Bytes that cannot be written: a full disk, a limit. The call is not at fault, and the command exits with 3.
class WriteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Collects the outputs of a command: paths are checked before the work, bytes are written to unnamed files in the
// target folder, and commit() gives all of them their names. An existing file is replaced. Whatever ends the process
// before commit() leaves nothing behind; only where the file system has no unnamed files, SIGKILL leaves a file with a
// name like .O.npy.<process>.<number>.tmp.
class OutputFiles {
 public:
  OutputFiles();
  OutputFiles(const OutputFiles&) = delete;
  OutputFiles& operator=(const OutputFiles&) = delete;
  ~OutputFiles();

  // No output may be this file.
  void keep(const std::filesystem::path& input);

  // Throws InputError if the folder does not exist or is not writable, if `path` is a folder, no regular file or not
  // writable, if another output has the same path, or if it is a file to keep. A symbolic link stands for the file that
  // it points to.
  void reserve(const std::filesystem::path& path);

  // Writes the bytes of a reserved path to disk. Throws WriteError if they do not fit.
  void write(const std::filesystem::path& path, std::span<const std::byte> bytes);

  // Renames all into place; each must have been written. Throws InputError if that fails; the files not yet renamed are
  // gone then.
  void commit();

 private:
  struct File;
  std::vector<std::filesystem::path> kept_;
  std::vector<File> files_;
};

}  // namespace distr::cli
