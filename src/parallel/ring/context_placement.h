#pragma once

namespace sb {

// Which rank of a context-parallel group holds which block of a sequence.
// A turn is `ranks` consecutive blocks.
enum class ContextPlacement {
  zigzag,   // 2·ranks runs of blocks; rank r has run r and run 2·ranks-1-r
  striped,  // block b on rank b mod ranks
  shifted,  // block b of turn k on rank (b + k) mod ranks: slashes spaced at multiples of `ranks` blocks, which meet in
            // one ring step on plain stripes, go to different ones
  triangular,  // block b of turn k on rank (b + k(k+1)/2) mod ranks: the shift from a turn to the next differs from
               // turn to turn, so that every slash that crosses turns is spread over all steps
};

}  // namespace sb
