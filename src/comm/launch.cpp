#include <fmt/format.h>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>

#include "comm/world.h"
#include "core/log.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// The processes a process started and that have not ended, from /proc/<pid>/stat: "pid (name) state parent ...".
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  for (const fs::directory_entry& entry :
       fs::directory_iterator("/proc", fs::directory_options::skip_permission_denied)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "stat");
    std::string text;
    std::getline(file, text);
    const size_t after_name = text.rfind(')');
    if (after_name == std::string::npos) continue;  // it has just ended
    char state = 0;
    int found = 0;
    if (std::sscanf(text.c_str() + after_name + 1, " %c %d", &state, &found) == 2 && found == parent && state != 'Z')
      children.push_back(std::stoi(name));
  }
  return children;
}

// The rank that a process of mpirun's is, by mpirun's word for it; -1 while it is not one yet.
int rank_of(pid_t process) {
  constexpr std::string_view kName = "OMPI_COMM_WORLD_RANK=";
  std::ifstream file(fmt::format("/proc/{}/environ", process), std::ios::binary);
  std::string word;
  while (std::getline(file, word, '\0'))
    if (word.starts_with(kName)) return std::atoi(word.c_str() + kName.size());
  return -1;
}

// The processes that mpirun started. It ends the other ranks when one dies. When one dies while they are still finding
// each other it sometimes waits for ever instead; ranks that end in peace do so together.
class RankWatch {
 public:
  // Alone, mpirun has only itself to end: on a busy machine that takes as long as it takes.
  static constexpr std::chrono::seconds kTimeToLeave{15}, kTimeAlone{120}, kTogether{2};

  explicit RankWatch(int ranks) : ranks_(ranks) {}
  ~RankWatch() {
    for (const Process& process : known_) close(process.descriptor);
  }
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // Takes the processes that mpirun has now. The ranks that ended, once mpirun had that long to end the others, or
  // itself.
  std::vector<int> gone(const std::vector<pid_t>& processes) {
    for (const pid_t process : processes) learn(process);
    started_ = started_ || !processes.empty();
    const auto now = std::chrono::steady_clock::now();
    if (!started_ || std::ssize(processes) >= ranks_) complete_ = now;
    if (!processes.empty()) emptied_ = now;
    // Those that did not end together left because one of them died.
    const bool in_peace = processes.empty() && emptied_ - complete_ < kTogether;
    if (now - complete_ <= (in_peace ? kTimeAlone : kTimeToLeave)) return {};
    std::set<int> living;
    for (const pid_t process : processes) living.insert(rank_of(process));
    std::vector<int> gone;
    for (int rank = 0; rank < ranks_; ++rank)
      if (!living.contains(rank)) gone.push_back(rank);
    return gone;
  }

  // Until a signal can be taken from `signals`, a rank ends, or it is time to look again.
  void wait(int signals) {
    std::vector<pollfd> polled = {{signals, POLLIN, 0}};
    if (ended_first_.empty())
      for (const Process& process : known_) polled.push_back({process.descriptor, POLLIN, 0});
    const bool all_known = std::ssize(known_) >= ranks_ &&
                           std::ranges::none_of(known_, [](const Process& process) { return process.rank < 0; });
    poll(polled.data(), polled.size(), all_known ? 500 : 20);
    for (size_t i = 1; i < polled.size(); ++i)
      if (polled[i].revents != 0) ended_first_.push_back(known_[i - 1].rank);
  }
  // The rank that ended before all others; several where that could not be told apart.
  const std::vector<int>& ended_first() const { return ended_first_; }

 private:
  struct Process {
    pid_t id;
    int rank, descriptor;
  };

  void learn(pid_t id) {
    auto process = std::ranges::find(known_, id, &Process::id);
    if (process == known_.end()) {
      const auto descriptor = static_cast<int>(syscall(SYS_pidfd_open, id, 0));
      if (descriptor < 0) return;  // it has just ended
      process = known_.insert(known_.end(), {id, -1, descriptor});
    }
    if (process->rank < 0) process->rank = rank_of(id);
  }

  const int ranks_;
  std::vector<Process> known_;
  std::vector<int> ended_first_;
  bool started_ = false;
  std::chrono::steady_clock::time_point complete_ = std::chrono::steady_clock::now();  // none was missing
  std::chrono::steady_clock::time_point emptied_ = complete_;                          // one was still there
};

std::vector<std::string> mpirun_arguments(int ranks, std::vector<std::string> command) {
  if (command[0].empty()) command[0] = fs::read_symlink("/proc/self/exe").string();
  // What a rank has to say it says itself, and who was killed is said below: mpirun would add half a page.
  std::vector<std::string> arguments = {"mpirun",          "--quiet",   "-n",  std::to_string(ranks),
                                        "--oversubscribe", "--bind-to", "none"};
  if (geteuid() == 0) arguments.push_back("--allow-run-as-root");
  // Copying out of another process's memory is forbidden in many containers, where it fails in the middle of a run.
  if (std::getenv("OMPI_MCA_btl_vader_single_copy_mechanism") == nullptr)
    arguments.insert(arguments.end(), {"--mca", "btl_vader_single_copy_mechanism", "none"});
  arguments.insert(arguments.end(), command.begin(), command.end());
  return arguments;
}

[[noreturn]] void become(const std::vector<std::string>& arguments, pid_t parent, int failure_pipe) {
  // A group of its own: Ctrl-C comes to the launcher alone, which passes it on to the ranks.
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  const int nothing = open("/dev/null", O_RDONLY);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  std::vector<char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  const int error = errno;
  (void)!write(failure_pipe, &error, sizeof error);
  _exit(127);
}

}  // namespace

Launched launch_local_ranks(int ranks, std::vector<std::string> command) {
  SB_USER_CHECK(ranks > 0, "--ranks: at least one, got {}", ranks);
  SB_CHECK(!command.empty());
  const std::vector<std::string> arguments = mpirun_arguments(ranks, std::move(command));

  // Taken one by one below instead of interrupting anything.
  sigset_t watched, before;
  sigemptyset(&watched);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD}) sigaddset(&watched, signal);
  sigprocmask(SIG_BLOCK, &watched, &before);

  int failure[2];
  SB_CHECK(pipe2(failure, O_CLOEXEC) == 0, "pipe: {}", std::strerror(errno));
  const pid_t launcher = getpid(), child = fork();
  SB_CHECK(child >= 0, "fork: {}", std::strerror(errno));
  if (child == 0) become(arguments, launcher, failure[1]);
  close(failure[1]);
  int error = 0;
  const bool failed = read(failure[0], &error, sizeof error) == sizeof error;
  close(failure[0]);

  const int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);
  SB_CHECK(signals >= 0, "signalfd: {}", std::strerror(errno));
  int status = 0;
  bool stopped = false;
  RankWatch watch(ranks);
  while (waitpid(child, &status, WNOHANG) == 0) {
    watch.wait(signals);
    signalfd_siginfo taken = {};
    const int signal = read(signals, &taken, sizeof taken) == sizeof taken ? static_cast<int>(taken.ssi_signo) : 0;
    const std::vector<pid_t> processes = children_of(child);
    if (const std::vector<int> gone = watch.gone(processes); !gone.empty()) {
      if (processes.empty())
        log::error("rank {} ended, then all others, and mpirun did not: it is ended now",
                   fmt::join(watch.ended_first(), ", "));
      else
        log::error("rank {} ended, and mpirun did not end the others within {} s: all are ended now",
                   fmt::join(gone, ", "), RankWatch::kTimeToLeave.count());
      for (const pid_t process : processes) kill(process, SIGKILL);
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      break;
    }
    if (signal == 0 || signal == SIGCHLD) continue;
    stopped = true;
    for (const pid_t process : processes) kill(process, signal);
    if (processes.empty()) kill(child, signal);
  }
  close(signals);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  // mpirun's way to say that a signal ended a rank; the program's own codes are smaller.
  if (const int signal = WIFEXITED(status) ? WEXITSTATUS(status) - 128 : 0; signal > 0 && !watch.ended_first().empty())
    log::error("rank {} was ended by signal {} ({}), and the others with it", fmt::join(watch.ended_first(), ", "),
               signal, strsignal(signal));
  SB_USER_CHECK(!failed, "mpirun does not start: {}. Install openmpi-bin, or run with one rank", std::strerror(error));
  return {WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status), stopped};
}

}  // namespace sb
