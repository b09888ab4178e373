#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace sb {

// events.jsonl: what happened to a run besides its steps. One object per line, written by whichever rank knows: a rank
// was lost or did not answer, one failed, the run was stopped, went on from a checkpoint, or ended.
struct RunEvent {
  std::string event = {};  // lost | timeout | failed | resumed | stopped | finished
  std::string time = {};   // UTC, "2026-11-19T22:07:35"; when it is written, where empty
  std::string host = {};   // of the rank; where empty, the one that writes
  int rank = -1;           // -1: all
  std::string reason = {};
  int64_t step = 0;  // the last one done; the one to go on from, where the run resumed
  // resumed: steps that are trained again, what they took, and the time since the last of them unless the run had been
  // stopped.
  int64_t steps_lost = 0;
  double seconds_lost = 0;
};

// A line at the end of the file, unless the directory holds no run yet. Never throws: who writes this has worse to say.
void append_event(const std::filesystem::path& directory, RunEvent event) noexcept;
// The same of something that many ranks see at the same time: nothing where one such event is a few seconds old.
void append_event_once(const std::filesystem::path& directory, const RunEvent& event) noexcept;
// Lines that are none are left out.
std::vector<RunEvent> read_events(const std::filesystem::path& directory);

// A process goes on from the checkpoint of `step` (0: from the beginning): what earlier ones did beyond it is lost.
// Before metrics.jsonl is cut there. Writes nothing where nothing came before.
void note_resume(const std::filesystem::path& directory, int64_t step);

// Of all processes of a run.
struct RunTimes {
  double trained = 0, lost = 0;  // seconds, in steps that count, and for nothing
  int64_t losses = 0;            // starts that found something lost
};
RunTimes run_times(const std::filesystem::path& directory);

}  // namespace sb
