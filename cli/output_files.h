// SPDX-License-Identifier: Apache-2.0
// Output files that appear whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace distr::cli {

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

  // Throws InputError if the folder does not exist or is not writable, if `path` is a folder, no regular file or not
  // writable, or if another output has the same path. A symbolic link stands for the file that it points to.
  void reserve(const std::filesystem::path& path);

  // Writes the bytes of a reserved path to disk. Throws InputError if they do not fit (a full disk, a limit).
  void write(const std::filesystem::path& path, std::span<const std::byte> bytes);

  // Renames all into place; each must have been written. Throws InputError if that fails; the files not yet renamed are
  // gone then.
  void commit();

 private:
  struct File;
  std::vector<File> files_;
};

}  // namespace distr::cli
