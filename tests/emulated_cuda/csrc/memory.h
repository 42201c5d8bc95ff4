// The memory of the device: what stands behind a data pointer, and the caching allocator's books.
#pragma once
#include <c10/core/Storage.h>

#include <array>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "streams.h"

namespace emu {

// -- caching.cpp: a model of CUDA's caching allocator ----------------------------------------------

// A piece of a segment, free or allocated. Addresses are the model's own: the bytes themselves lie
// wherever the host's allocator or a CPU kernel put them.
struct Place;

Place* take_place(int device, int stream, size_t bytes);  // may throw OutOfMemoryError
// `history` is of whoever used it last; relative to the start of the place.
void give_place(Place* place, std::vector<Access> history);
void use_place(Place* place, int stream);  // record_stream
std::vector<Access> history_of(const Place* place);
void release_cached(int device);
void set_memory_fraction(double fraction, int device);
int64_t memory_total();
int64_t memory_reserved(int device);
struct Count {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t n);
};
using Counts = std::map<std::string, std::array<Count, 3>>;  // all, small pool, large pool
Counts memory_counts(int device);
std::map<std::string, int64_t> memory_events(int device);  // num_ooms and so on
void reset_peak(int device);
void reset_accumulated(int device);

// -- memory.cpp ------------------------------------------------------------------------------------

// What stands behind a data pointer of the device.
struct Block {
  void* data = nullptr;
  size_t bytes = 0;
  int device = 0;
  int stream = 0;                            // current when it was allocated
  c10::intrusive_ptr<c10::StorageImpl> cpu;  // whose memory it is, where a CPU kernel made it
  bool mapped = false;                       // a file that processes share
  std::string path;                          // to unlink, where this process made it
  Place* place = nullptr;                    // null: another process's memory, counted there
  Accesses accesses;
};

Block* block_of(const c10::DataPtr& data);  // null where there is no memory
inline Block* block_of(const c10::StorageImpl* storage) {
  return block_of(storage->data_ptr());
}
void record_use(const c10::DataPtr& data, int stream);  // record_stream

}  // namespace emu
