// The arithmetic of collectives over a link: plain functions over bytes.
//
// Sums are taken in the order of ranks, in the tensor's own type, so every rank gets the same bits.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "link.h"

namespace emu {

enum class Reduce : int16_t { kSum, kAvg, kProduct, kMin, kMax };  // torch's numbers

struct Bytes {
  char* data;
  int64_t size;
};

void meet(Link& link);
void broadcast(Link& link, Bytes data, int root);
void all_reduce(Link& link, Bytes data, at::ScalarType type, Reduce op);
void reduce(Link& link, Bytes data, at::ScalarType type, Reduce op, int root);
// One output for each rank.
void all_gather(Link& link, Bytes in, const std::vector<Bytes>& outs);
// One input for each rank.
void reduce_scatter(
    Link& link, Bytes out, const std::vector<Bytes>& ins, at::ScalarType type, Reduce op);
// One of each for each rank, of any size; what one rank sends, the other must expect.
void all_to_all(Link& link, const std::vector<Bytes>& outs, const std::vector<Bytes>& ins);

}  // namespace emu
