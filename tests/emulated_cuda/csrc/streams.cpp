#include "streams.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "device.h"
#include "late.h"
#include "memory.h"
#include "pending.h"

namespace emu {

// -- streams and their clocks ----------------------------------------------------------------------

namespace {

constexpr int kPool = 32;  // torch hands out so many streams per device, in turn
constexpr int kIds = kPool + 1;

struct StreamState {
  int device;
  std::string name;
  Clock clock;            // what is done before its next work; its own entry counts its work
  int64_t host_seen = 0;  // version of the host's clock that is merged in
};

std::mutex order;  // guards all that follows, and every Accesses
std::vector<StreamState> streams;
Clock host;  // what some thread of this process has waited for
int64_t host_version = 0;
std::array<std::array<std::atomic<int>, kIds>, kMaxDevices> numbers{};  // number + 1; 0: none yet
thread_local std::array<int64_t, kMaxDevices> chosen{};

int64_t at(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

void merge(Clock& into, const Clock& from) {
  if (from.size() > into.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// The host launches after what it has waited for.
Clock& clock_of(int stream) {
  auto& state = streams[stream];
  if (state.host_seen != host_version) {
    merge(state.clock, host);
    state.host_seen = host_version;
  }
  return state.clock;
}

int add_stream(int device, std::string name) {
  int number = static_cast<int>(streams.size());
  streams.push_back({device, std::move(name), Clock(number + 1, 0)});
  return number;
}

}  // namespace

int stream_number(int device, int64_t id) {
  TORCH_CHECK(id >= 0 && id < kIds, "CUDA error: invalid resource handle (emulated stream ", id, ")");
  auto& known = numbers[device][id];
  if (int found = known.load(std::memory_order_acquire)) return found - 1;
  std::lock_guard<std::mutex> lock(order);
  if (int found = known.load()) return found - 1;
  auto name = id ? c10::str("stream ", id) : std::string("the default stream");
  int number = add_stream(device, c10::str(name, " of cuda:", device));
  known.store(number + 1, std::memory_order_release);
  return number;
}

int new_stream(int device, const std::string& name) {
  std::lock_guard<std::mutex> lock(order);
  return add_stream(device, c10::str("the stream of ", name, " on cuda:", device));
}

int64_t current_stream_id(int device) { return chosen[device]; }
int current_stream(int device) { return stream_number(device, chosen[device]); }

void set_current_stream(int device, int64_t id) {
  check_device(device);
  stream_number(device, id);
  chosen[device] = id;
}

int64_t next_stream_id(int device) {
  static std::array<std::atomic<int64_t>, kMaxDevices> next{};
  return next[device]++ % kPool + 1;
}

std::string stream_name(int stream) {
  std::lock_guard<std::mutex> lock(order);
  return streams.at(stream).name;
}

Clock record_clock(int stream) {
  std::lock_guard<std::mutex> lock(order);
  return clock_of(stream);
}

void wait_clock(int stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(order);
  Clock& mine = clock_of(stream);
  int64_t own = mine[stream];
  merge(mine, clock);
  mine[stream] = own;
}

Clock device_clock(int device) {
  std::lock_guard<std::mutex> lock(order);
  Clock all;
  for (size_t i = 0; i < streams.size(); ++i)
    if (streams[i].device == device) merge(all, clock_of(static_cast<int>(i)));
  return all;
}

int64_t launched(int stream) {
  std::lock_guard<std::mutex> lock(order);
  return ++clock_of(stream)[stream];
}

bool comes_before(int stream, int64_t time, int later) {
  std::lock_guard<std::mutex> lock(order);
  return stream == later || at(clock_of(later), stream) >= time;
}

bool host_has_waited(int stream, int64_t time) {
  std::lock_guard<std::mutex> lock(order);
  return at(host, stream) >= time;
}

bool host_poll(const Clock& clock) {
  if (anything_pending() && !clock_done(clock)) return false;
  {
    std::lock_guard<std::mutex> lock(order);
    merge(host, clock);
    ++host_version;
  }
  land_what_is_done();
  return true;
}

// -- host synchronisations -------------------------------------------------------------------------

namespace {
std::mutex counts_mutex;
std::map<std::string, int64_t> counts;
}  // namespace

void host_wait(const Clock& clock, const char* what) {
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    counts[what]++;
  }
  if (anything_pending()) await_clock(clock);
  host_poll(clock);
}

std::map<std::string, int64_t> synchronizations() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return counts;
}
void reset_synchronizations() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counts.clear();
}

// -- races -----------------------------------------------------------------------------------------

namespace {

std::string told(const Access& before, const Access& now, int64_t bytes) {
  auto verb = [](const Access& one, const char* reads, const char* writes) {
    return one.write ? writes : reads;
  };
  return c10::str(
      "emulated CUDA: race: ", now.op, " on ", streams[now.stream].name, " ",
      verb(now, "reads", "writes"), " memory that ", before.op, " on ",
      streams[before.stream].name, " ", verb(before, "reads", "writes"),
      ", and nothing orders the two: bytes ", std::max(now.low, before.low), " to ",
      std::min(now.high, before.high), " of a storage of ", bytes,
      " bytes. wait_stream, wait_event, Work.wait or a synchronisation orders them; record_stream"
      " keeps memory from being handed out again while another stream uses it.");
}

// Only these can be unordered with work to come; more than this many are forgotten, oldest first.
constexpr size_t kMaxEntries = 2048;

void forget(Accesses& accesses) {
  auto& all = accesses.entries;
  auto done = [](const Access& one) { return at(host, one.stream) >= one.time; };
  all.erase(std::remove_if(all.begin(), all.end(), done), all.end());
  if (all.size() > kMaxEntries / 2) all.erase(all.begin(), all.end() - kMaxEntries / 2);
  accesses.recent = 0;
}

bool same_range(const Access& a, const Access& b) {
  return a.low == b.low && a.high == b.high && a.stream == b.stream && a.write == b.write;
}

void remember(Accesses& accesses, const Access& now, const Clock& mine) {
  auto& all = accesses.entries;
  for (auto& [stream, time] : accesses.last)
    if (stream == now.stream) {
      time = now.time;
      goto found;
    }
  accesses.last.emplace_back(now.stream, now.time);
found:
  for (size_t i = 0, n = all.size(); i < n; ++i) {
    size_t k = accesses.recent + i;
    if (k >= n) k -= n;
    if (same_range(all[k], now)) {
      all[k].time = now.time;
      all[k].op = now.op;
      accesses.recent = k + 1 < n ? k + 1 : 0;
      return;
    }
  }
  if (now.write) {  // whoever comes after this write comes after what it came after
    auto covered = [&](const Access& one) {
      return one.low >= now.low && one.high <= now.high &&
             (one.stream == now.stream || at(mine, one.stream) >= one.time);
    };
    all.erase(std::remove_if(all.begin(), all.end(), covered), all.end());
    accesses.recent = 0;
  }
  if (all.size() >= kMaxEntries) forget(accesses);
  all.push_back(now);
}

}  // namespace

void touch(
    Accesses& accesses, int64_t low, int64_t high, bool write, int stream, int64_t time,
    const char* op, int64_t bytes) {
  if (low >= high) return;
  std::string message;
  {
    std::lock_guard<std::mutex> lock(order);
    const Clock& mine = clock_of(stream);
    const Access now{low, high, stream, time, op, write};
    bool behind = false;
    for (auto& [other, last] : accesses.last) behind |= other != stream && last > at(mine, other);
    if (behind)
      for (auto& before : accesses.entries)
        if (before.stream != stream && before.time > at(mine, before.stream) &&
            (write || before.write) && before.low < high && low < before.high) {
          message = told(before, now, bytes);
          break;
        }
    if (!message.empty()) accesses = {};  // told once
    remember(accesses, now, mine);
  }
  TORCH_CHECK(message.empty(), message);
}

std::vector<Access> Accesses::history(int64_t bytes) const {
  std::vector<Access> by_stream;
  std::lock_guard<std::mutex> lock(order);
  for (auto& one : entries) {
    if (at(host, one.stream) >= one.time) continue;
    auto same = [&](const Access& other) { return other.stream == one.stream; };
    auto found = std::find_if(by_stream.begin(), by_stream.end(), same);
    if (found == by_stream.end()) {
      by_stream.push_back(one);
      found = by_stream.end() - 1;
    } else if (one.time > found->time) {
      *found = one;
    }
    found->low = 0;
    found->high = bytes;
  }
  return by_stream;
}

Launch::Launch(int stream, const char* op, bool now)
    : stream_(stream), time_(launched(stream)), op_(op) {
  if (now && anything_pending()) await_clock(record_clock(stream));
}

static void note(const at::Tensor& t, bool write, int stream, int64_t time, const char* op) {
  if (!t.defined() || !t.is_cuda() || t.numel() == 0) return;
  land_into(t);
  auto* storage = t.storage().unsafeGetStorageImpl();
  Block* block = block_of(storage);
  if (!block) return;
  int64_t elements = 1;
  for (int64_t i = 0; i < t.dim(); ++i) elements += (t.size(i) - 1) * t.stride(i);
  int64_t width = static_cast<int64_t>(t.dtype().itemsize()), low = t.storage_offset() * width;
  touch(
      block->accesses, low, low + elements * width, write, stream, time, op,
      static_cast<int64_t>(storage->nbytes()));
}

void Launch::reads(const at::Tensor& tensor) { note(tensor, false, stream_, time_, op_); }
void Launch::writes(const at::Tensor& tensor) { note(tensor, true, stream_, time_, op_); }

}  // namespace emu
