# The software device's own tests: every way in which it is stricter than a GPU has one that fails without it.
foreach(name device_functions memory products streams)
  sb_test(softgpu_${name}_test SOURCES softgpu/${name}_test.cpp LIBS softgpu GTest::gmock)
endforeach()
sb_test(softgpu_nccl_test SOURCES softgpu/nccl_test.cpp LIBS sb_comm softgpu GTest::gmock)
set_tests_properties(softgpu_nccl_test PROPERTIES ENVIRONMENT SOFTGPU_DEVICES=2)
# And in other orders of streams: what must not change does not.
foreach(name nccl products streams)
  foreach(order eager random:1 random:2)
    string(REPLACE ":" "_" suffix ${order})
    add_test(NAME softgpu_${name}_test_${suffix} COMMAND softgpu_${name}_test)
    set_tests_properties(softgpu_${name}_test_${suffix} PROPERTIES LABELS fast TIMEOUT 120
                         ENVIRONMENT "SOFTGPU_STREAMS=${order};SOFTGPU_DEVICES=2")
  endforeach()
endforeach()
