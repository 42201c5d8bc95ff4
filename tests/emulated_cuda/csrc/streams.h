// What came before what. Kernels run when they are called; streams carry vector clocks instead, and
// every storage remembers who touched which bytes and when, so that a kernel that touches bytes
// without an ordering edge to who touched them before is an error, as a sanitizer would report it.
//
// A collective is work on a stream of its communicator's own:
//
//     int stream = new_stream(device, "NCCL communicator 3");             // once
//     wait_clock(stream, record_clock(current_stream(device)));           // it begins after ...
//     Launch launch(stream, "nccl:all_reduce");
//     launch.reads(in); launch.writes(out);                               // may throw: a race
//     Clock done = record_clock(stream);
//     ...
//     wait_clock(current_stream(device), done);                           // Work.wait()
//     host_wait(done, "barrier");                                         // where the host blocks
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emu {

// Streams have small numbers, one per stream used in this process, whatever its device.
using Clock = std::vector<int64_t>;  // by stream number: all its work up to this time is done

int current_stream(int device);  // of the calling thread
int stream_number(int device, int64_t id);
int new_stream(int device, const std::string& name);
std::string stream_name(int stream);

Clock record_clock(int stream);                   // all work launched on the stream so far
void wait_clock(int stream, const Clock& clock);  // what it is given from now on comes after that
// The host blocks until `clock` is done; counted under `what`.
void host_wait(const Clock& clock, const char* what);

// One piece of work on a stream and the memory it touches; `op` must outlive the process's storages.
class Launch {
 public:
  Launch(int stream, const char* op);
  void reads(const at::Tensor& tensor);
  void writes(const at::Tensor& tensor);

 private:
  int stream_;
  int64_t time_;
  const char* op_;
};

}  // namespace emu
