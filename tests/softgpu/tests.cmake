# The software device's own tests: every way in which it is stricter than a GPU has one that fails without it.
foreach(name memory streams)
  sb_test(softgpu_${name}_test SOURCES softgpu/${name}_test.cpp LIBS softgpu)
endforeach()
