#include "core/errors.h"

void refuse(const char* what) {
  throw sb::UserError("{}: not wanted", what);
}
