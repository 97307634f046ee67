// Parts of the Python module that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace slip {

void bind_memory(nanobind::module_& m);
void bind_suffix(nanobind::module_& m);
void bind_instruments(nanobind::module_& m);

}  // namespace slip
