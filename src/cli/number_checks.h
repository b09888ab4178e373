#pragma once

namespace CLI {
class App;
}

namespace sb {

// Lets every option of the application and its commands that takes a number refuse what does not fit: the library's own
// conversion takes the nearest number that does, and -1 for the largest without a sign. To be called when all are
// there.
void check_numbers(CLI::App& app);

}  // namespace sb
