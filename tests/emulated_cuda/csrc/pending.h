// Work that was put on a stream and is not done yet in real time.
//
// Kernels here run when they are called. Only collectives take their time, in threads of their own,
// while the host runs on as it does with a real GPU. Clocks tell who has to wait for them: a kernel,
// or the host, whose clock covers a collective waits for it before it touches any byte.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "streams.h"

namespace emu {

struct Pending {
  virtual ~Pending() = default;
  virtual bool done() const = 0;
  virtual bool failed() const = 0;
  // Blocks the host; throws what went wrong.
  virtual void wait() = 0;
};
using PendingPtr = std::shared_ptr<Pending>;

// One relaxed load, so that every kernel may ask.
bool anything_pending();
void put_pending(int stream, int64_t time, PendingPtr work);
// Its failure has been told, and nobody behind it on the stream is to be told again.
void forget_pending(const PendingPtr& work);
std::vector<PendingPtr> pending_in(const Clock& clock);
void await_clock(const Clock& clock);
bool clock_done(const Clock& clock);

}  // namespace emu
