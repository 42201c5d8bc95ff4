// A model of CUDA's caching allocator: which segments it would ask the driver for, which blocks it
// would hand out, split, merge and keep. Only the books are kept here, by made-up addresses; the
// rules are those of torch's c10/cuda/CUDACachingAllocator with its default settings.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "device.h"
#include "memory.h"

namespace emu {

namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kMinBlock = 512;          // sizes are multiples of it
constexpr int64_t kSmallSize = kMiB;        // the largest request of the small pool
constexpr int64_t kSmallSegment = 2 * kMiB;
constexpr int64_t kLargeSegment = 20 * kMiB;
constexpr int64_t kMinOwnSegment = 10 * kMiB;  // from here on a request gets a segment of its own
constexpr int64_t kRoundOwn = 2 * kMiB;

enum Pool { kAll = 0, kSmall = 1, kLarge = 2 };

}  // namespace

struct Place {
  int device, stream;
  Pool pool;
  int64_t address, size, requested = 0;
  bool allocated = false;
  Place *previous = nullptr, *next = nullptr;  // in the segment
  std::set<int> uses;                          // streams named by record_stream
  std::vector<Access> history;                 // by address: what the next owner must come after
  bool split() const { return previous || next; }
};

namespace {

struct BySize {
  bool operator()(const Place* a, const Place* b) const {
    return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
  }
};

// One kind of statistic for all pools, the small one and the large one.
using Row = std::array<Count, 3>;

struct Books {
  Row allocation, segment, active, inactive_split, allocated_bytes, reserved_bytes, active_bytes,
      inactive_split_bytes, requested_bytes;
  int64_t retries = 0, ooms = 0, device_allocations = 0, device_frees = 0;
  std::set<Place*, BySize> free[3];
  std::vector<std::pair<Place*, Clock>> awaited;  // freed, and still used by other streams
  std::set<Place*> heads;                         // the first place of every segment
  int64_t next_address = int64_t{1} << 40;
  double fraction = 1.0;

  std::vector<std::pair<const char*, Row*>> rows() {
    return {
        {"allocation", &allocation}, {"segment", &segment}, {"active", &active},
        {"inactive_split", &inactive_split}, {"allocated_bytes", &allocated_bytes},
        {"reserved_bytes", &reserved_bytes}, {"active_bytes", &active_bytes},
        {"inactive_split_bytes", &inactive_split_bytes}, {"requested_bytes", &requested_bytes}};
  }
};

std::mutex books_mutex;
std::array<Books, kMaxDevices> all_books;

void add(Row& row, Pool pool, int64_t n) {
  if (n == 0) return;
  row[kAll].add(n);
  row[pool].add(n);
}

int64_t rounded(int64_t n) {
  return n < kMinBlock ? kMinBlock : (n + kMinBlock - 1) / kMinBlock * kMinBlock;
}

int64_t segment_size(int64_t size) {
  if (size <= kSmallSize) return kSmallSegment;
  if (size < kMinOwnSegment) return kLargeSegment;
  return (size + kRoundOwn - 1) / kRoundOwn * kRoundOwn;
}

void keep_free(Books& books, Place* place, bool is_free) {
  if (is_free) {
    books.free[place->pool].insert(place);
  } else {
    books.free[place->pool].erase(place);
  }
  if (!place->split()) return;
  add(books.inactive_split, place->pool, is_free ? 1 : -1);
  add(books.inactive_split_bytes, place->pool, is_free ? place->size : -place->size);
}

// Neighbours of one stream become one entry, as late as the later: histories stay short.
void compress(std::vector<Access>& history) {
  std::sort(history.begin(), history.end(), [](const Access& a, const Access& b) {
    return std::tie(a.stream, a.low) < std::tie(b.stream, b.low);
  });
  std::vector<Access> kept;
  for (auto& one : history) {
    if (host_has_waited(one.stream, one.time)) continue;
    if (!kept.empty() && kept.back().stream == one.stream && one.low <= kept.back().high) {
      auto& last = kept.back();
      if (one.time > last.time) last.time = one.time, last.op = one.op, last.write = one.write;
      last.high = std::max(last.high, one.high);
    } else {
      kept.push_back(one);
    }
  }
  history = std::move(kept);
}

std::vector<Access> part(const std::vector<Access>& history, int64_t low, int64_t high) {
  std::vector<Access> inside;
  for (auto one : history) {
    if (one.high <= low || one.low >= high) continue;
    one.low = std::max(one.low, low);
    one.high = std::min(one.high, high);
    inside.push_back(one);
  }
  return inside;
}

// `place` and its right-hand neighbour become one; both are in no list of free places.
void join(Place* place) {
  Place* gone = place->next;
  place->size += gone->size;
  place->next = gone->next;
  if (place->next) place->next->previous = place;
  place->history.insert(place->history.end(), gone->history.begin(), gone->history.end());
  delete gone;
}

// Back among the free places of its segment.
void put_back(Books& books, Place* place) {
  add(books.active, place->pool, -1);
  add(books.active_bytes, place->pool, -place->size);
  auto is_free = [&](Place* one) { return one && books.free[one->pool].count(one) > 0; };
  const bool left = is_free(place->previous), right = is_free(place->next);
  if (left) keep_free(books, place->previous, false);
  if (right) keep_free(books, place->next, false);
  if (right) join(place);
  if (left) {
    place = place->previous;
    join(place);
  }
  if (left || right || place->history.size() > 1) compress(place->history);
  keep_free(books, place, true);
}

// Freed places whose other streams the host knows to be done.
void put_back_done(Books& books, bool all) {
  auto& waiting = books.awaited;
  for (size_t i = 0; i < waiting.size();) {
    auto& [place, clock] = waiting[i];
    bool done = all;
    if (!done) {
      done = true;
      for (size_t s = 0; s < clock.size(); ++s) done &= host_has_waited(static_cast<int>(s), clock[s]);
    }
    if (!done) {
      ++i;
      continue;
    }
    place->uses.clear();
    put_back(books, place);
    waiting.erase(waiting.begin() + static_cast<int64_t>(i));
  }
}

int64_t limit(const Books& books) {
  return static_cast<int64_t>(static_cast<double>(memory_total()) * books.fraction);
}

Place* new_segment(Books& books, int device, int stream, Pool pool, int64_t size) {
  if (books.reserved_bytes[kAll].current + size > limit(books)) return nullptr;
  auto* place = new Place{device, stream, pool, books.next_address, size};
  books.next_address += size + kLargeSegment;
  books.heads.insert(place);
  books.device_allocations++;
  add(books.segment, pool, 1);
  add(books.reserved_bytes, pool, size);
  return place;
}

bool release_free_segments(Books& books) {
  bool any = false;
  for (Pool pool : {kSmall, kLarge}) {
    auto& free = books.free[pool];
    for (auto it = free.begin(); it != free.end();) {
      Place* place = *it;
      if (place->split()) {
        ++it;
        continue;
      }
      it = free.erase(it);
      books.heads.erase(place);
      books.device_frees++;
      add(books.segment, pool, -1);
      add(books.reserved_bytes, pool, -place->size);
      delete place;
      any = true;
    }
  }
  return any;
}

Place* best_fit(Books& books, int stream, Pool pool, int64_t size) {
  Place wanted{0, stream, pool, 0, size};
  auto found = books.free[pool].lower_bound(&wanted);
  if (found == books.free[pool].end() || (*found)->stream != stream) return nullptr;
  Place* place = *found;
  keep_free(books, place, false);
  return place;
}

// What is left of a place stays free, if it is worth it.
void split(Books& books, Place* place, int64_t size) {
  const int64_t left = place->size - size;
  if (place->pool == kSmall ? left < kMinBlock : left <= kSmallSize) return;
  auto* rest = new Place{place->device, place->stream, place->pool, place->address + size, left};
  rest->previous = place;
  rest->next = place->next;
  if (rest->next) rest->next->previous = rest;
  place->next = rest;
  place->size = size;
  rest->history = part(place->history, rest->address, rest->address + left);
  place->history = part(place->history, place->address, place->address + size);
  keep_free(books, rest, true);
}

std::string gigabytes(int64_t n) {
  char text[32];
  if (n >= 1 << 30) {
    snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(n) / (1 << 30));
  } else {
    snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(n) / kMiB);
  }
  return text;
}

[[noreturn]] void out_of_memory(Books& books, int device, int64_t bytes) {
  books.ooms++;
  int64_t reserved = books.reserved_bytes[kAll].current;
  int64_t allocated = books.allocated_bytes[kAll].current;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", gigabytes(bytes), ". GPU ",
      device, " (emulated) has a total capacity of ", gigabytes(memory_total()), " of which ",
      gigabytes(memory_total() - reserved), " is free. Of the allocated memory ",
      gigabytes(allocated), " is allocated by PyTorch, and ", gigabytes(reserved - allocated),
      " is reserved by PyTorch but unallocated.");
  __builtin_unreachable();
}

}  // namespace

void Count::add(int64_t n) {
  current += n;
  peak = std::max(peak, current);
  (n > 0 ? allocated : freed) += n > 0 ? n : -n;
}

Place* take_place(int device, int stream, size_t bytes) {
  std::lock_guard<std::mutex> lock(books_mutex);
  Books& books = all_books[device];
  if (!books.awaited.empty()) put_back_done(books, false);
  const int64_t size = rounded(static_cast<int64_t>(bytes));
  const Pool pool = size <= kSmallSize ? kSmall : kLarge;
  Place* place = best_fit(books, stream, pool, size);
  if (!place) place = new_segment(books, device, stream, pool, segment_size(size));
  if (!place) {  // everything cached goes back to the driver, and once more
    put_back_done(books, true);
    release_free_segments(books);
    place = new_segment(books, device, stream, pool, segment_size(size));
    if (place) books.retries++;
  }
  if (!place) out_of_memory(books, device, size);
  split(books, place, size);
  place->allocated = true;
  place->requested = static_cast<int64_t>(bytes);
  add(books.allocation, pool, 1);
  add(books.active, pool, 1);
  add(books.allocated_bytes, pool, place->size);
  add(books.active_bytes, pool, place->size);
  add(books.requested_bytes, pool, place->requested);
  return place;
}

void give_place(Place* place, std::vector<Access> history) {
  for (auto& one : history) {
    one.low = place->address;
    one.high = place->address + place->size;
  }
  Clock used;
  if (!place->uses.empty()) {
    for (int stream : place->uses) {
      Clock clock = record_clock(stream);
      used.resize(std::max<size_t>(used.size(), stream + 1), 0);
      used[stream] = clock[stream];
    }
  }
  std::lock_guard<std::mutex> lock(books_mutex);
  Books& books = all_books[place->device];
  place->allocated = false;
  place->history = std::move(history);
  add(books.allocation, place->pool, -1);
  add(books.allocated_bytes, place->pool, -place->size);
  add(books.requested_bytes, place->pool, -place->requested);
  if (used.empty()) {
    put_back(books, place);
  } else {
    books.awaited.emplace_back(place, std::move(used));
  }
}

void use_place(Place* place, int stream) {
  std::lock_guard<std::mutex> lock(books_mutex);
  if (stream != place->stream) place->uses.insert(stream);
}

std::vector<Access> history_of(const Place* place) {
  std::lock_guard<std::mutex> lock(books_mutex);
  auto relative = place->history;
  for (auto& one : relative) one.low -= place->address, one.high -= place->address;
  return relative;
}

void release_cached(int device) {
  std::lock_guard<std::mutex> lock(books_mutex);
  put_back_done(all_books[device], true);
  release_free_segments(all_books[device]);
}

void set_memory_fraction(double fraction, int device) {
  check_device(device);
  std::lock_guard<std::mutex> lock(books_mutex);
  all_books[device].fraction = fraction;
}

int64_t memory_total() {
  static const int64_t bytes = [] {
    const char* text = std::getenv("EMULATED_CUDA_MEMORY_GB");
    return static_cast<int64_t>((text && *text ? std::atof(text) : 80.0) * (1 << 30));
  }();
  return bytes;
}

int64_t memory_reserved(int device) {
  check_device(device);
  std::lock_guard<std::mutex> lock(books_mutex);
  return all_books[device].reserved_bytes[kAll].current;
}

Counts memory_counts(int device) {
  check_device(device);
  std::lock_guard<std::mutex> lock(books_mutex);
  Counts all;
  for (auto& [name, row] : all_books[device].rows()) all[name] = *row;
  return all;
}

std::map<std::string, int64_t> memory_events(int device) {
  std::lock_guard<std::mutex> lock(books_mutex);
  auto& books = all_books[device];
  return {
      {"num_alloc_retries", books.retries}, {"num_ooms", books.ooms},
      {"num_device_alloc", books.device_allocations}, {"num_device_free", books.device_frees}};
}

void reset_peak(int device) {
  check_device(device);
  std::lock_guard<std::mutex> lock(books_mutex);
  for (auto& [name, row] : all_books[device].rows())
    for (auto& count : *row) count.peak = count.current;
}

void reset_accumulated(int device) {
  check_device(device);
  std::lock_guard<std::mutex> lock(books_mutex);
  for (auto& [name, row] : all_books[device].rows())
    for (auto& count : *row) count.allocated = count.freed = 0;
  all_books[device].retries = all_books[device].ooms = 0;
}

}  // namespace emu
