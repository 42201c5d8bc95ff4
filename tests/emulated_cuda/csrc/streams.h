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
  // `now`: it runs in this call, so collectives that it comes after must be done. Blocks.
  Launch(int stream, const char* op, bool now = true);
  void reads(const at::Tensor& tensor);
  void writes(const at::Tensor& tensor);
  int64_t time() const { return time_; }

 private:
  int stream_;
  int64_t time_;
  const char* op_;
};

// An event of CUDA: a moment on a stream.
struct Event {
  Clock clock;
};

// -- what the other sources of the device use -------------------------------------------------------

// Who touched which bytes of one storage, or of one piece of pinned memory.
struct Access {
  int64_t low, high;  // bytes from the start of the memory
  int stream;
  int64_t time;
  const char* op;
  bool write;
};

struct Accesses {
  std::vector<Access> entries;
  std::vector<std::pair<int, int64_t>> last;  // by stream: time of its last access
  size_t recent = 0;                          // entry found last: loops touch them in turn

  // What somebody who gets this memory next must come after; nothing the host has waited for.
  std::vector<Access> history(int64_t bytes) const;
};

// Memory [low, high) of `accesses` is touched by work at `time` on `stream`; throws on a race.
void touch(
    Accesses& accesses, int64_t low, int64_t high, bool write, int stream, int64_t time,
    const char* op, int64_t bytes);
int64_t launched(int stream);  // a piece of work starts on the stream; its time
bool comes_before(int stream, int64_t time, int later);  // is it done before later work of `later`?
bool host_has_waited(int stream, int64_t time);
void set_current_stream(int device, int64_t id);
int64_t current_stream_id(int device);
int64_t next_stream_id(int device);
Clock device_clock(int device);
// Does the host see that it is done? Then it knows, without having waited.
bool host_poll(const Clock& clock);

// How often the host waited for the device, by operator.
std::map<std::string, int64_t> synchronizations();
void reset_synchronizations();

}  // namespace emu
