#include "core/require.h"

namespace jattn {

void fail(Fault fault, const std::string& text) { throw Error(fault, text); }

}  // namespace jattn
