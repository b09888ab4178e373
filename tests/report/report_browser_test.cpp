// The report as a browser sees it: scripts run, nothing fails, hostile names stay text.

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "core/errors.h"
#include "report/report.h"
#include "tests/data/temporary_folder.h"
#include "tests/report/report_fixture.h"

namespace sb {
namespace {

bool has_chromium() {
  return std::system("command -v chromium >/dev/null 2>&1") == 0;
}

// Standard output of headless Chromium, in a profile of its own.
std::string chromium(const TemporaryFolder& folder, const std::string& arguments) {
  const std::string command =
      "timeout 100 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
      "--virtual-time-budget=2000 --user-data-dir=" +
      folder.path("profile") + " " + arguments + " 2>/dev/null";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  std::string out;
  std::array<char, 4096> buffer;
  for (size_t got; (got = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) out.append(buffer.data(), got);
  EXPECT_EQ(::pclose(pipe), 0) << command;
  return out;
}

class ReportInBrowser : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_chromium())
      GTEST_SKIP() << "no chromium here, in which this looks at the report; as root: apt-get install chromium";
  }
};

TEST_F(ReportInBrowser, ShowsChartsAndSchedules) {
  TemporaryFolder folder;
  ReportInput input = example_run(40, 2);
  input.name = "<script>document.body.dataset.owned=1</script>";
  input.run_config = "</pre><img src=x onerror=\"document.body.dataset.owned=1\">";
  write_bytes(folder.path("report.html"), write_report(input));
  const std::string page = chromium(folder, "--dump-dom file://" + folder.path("report.html"));
  // Loss, throughput, coverage, budget, step time, micro-batches, planning.
  EXPECT_NE(page.find("data-charts=\"7\""), std::string::npos);
  EXPECT_EQ(page.find("data-error"), std::string::npos);
  EXPECT_EQ(page.find("data-owned"), std::string::npos);
  // One schedule is shown, the others wait for the chooser.
  EXPECT_NE(page.find("<figure class=\"schedule\" data-step=\"21\">"), std::string::npos);
  EXPECT_NE(page.find("<figure class=\"schedule\" data-step=\"40\" hidden=\"\">"), std::string::npos);
  EXPECT_NE(page.find("<figure class=\"schedule\" data-step=\"1\" hidden=\"\">"), std::string::npos);

  chromium(folder,
           "--window-size=1200,1600 --screenshot=" + folder.path("page.png") + " file://" + folder.path("report.html"));
  ASSERT_TRUE(std::filesystem::exists(folder.path("page.png")));
  EXPECT_GT(std::filesystem::file_size(folder.path("page.png")), 20'000u);  // a blank page has about 5 kB
}

TEST_F(ReportInBrowser, ARunWithoutStepsIsAPageToo) {
  TemporaryFolder folder;
  write_bytes(folder.path("report.html"), write_report({}));
  const std::string page = chromium(folder, "--dump-dom file://" + folder.path("report.html"));
  EXPECT_NE(page.find("data-charts=\"0\""), std::string::npos);
  EXPECT_EQ(page.find("data-error"), std::string::npos);
}

}  // namespace
}  // namespace sb
