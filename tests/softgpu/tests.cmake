# The software device's own tests: how it is stricter than a GPU.
foreach(name device_functions engine memory nccl products streams)
  sb_test(softgpu_${name}_test SOURCES softgpu/${name}_test.cpp LIBS sb_comm softgpu GTest::gmock)
  # NCCL's ranks have a GPU each.
  set_tests_properties(softgpu_${name}_test PROPERTIES LABELS "fast;softgpu" ENVIRONMENT SOFTGPU_DEVICES=2)
endforeach()
# Its kernels are written as those of src/ are.
target_include_directories(softgpu_engine_test BEFORE PRIVATE softgpu/twins)
target_compile_options(softgpu_engine_test PRIVATE -Wno-unknown-pragmas -Wno-shadow -fno-strict-aliasing)
foreach(order reverse random)
  add_test(NAME softgpu_engine_test_${order} COMMAND softgpu_engine_test)
  set_tests_properties(softgpu_engine_test_${order} PROPERTIES LABELS "fast;softgpu" TIMEOUT 120
                       ENVIRONMENT "SOFTGPU_ORDER=${order};SOFTGPU_COPIES=eager")
endforeach()
# And in other orders of streams: what must not change does not.
foreach(name nccl products streams)
  foreach(order eager random:1 random:2)
    string(REPLACE ":" "_" suffix ${order})
    add_test(NAME softgpu_${name}_test_${suffix} COMMAND softgpu_${name}_test)
    set_tests_properties(softgpu_${name}_test_${suffix} PROPERTIES LABELS "fast;softgpu" TIMEOUT 120
                         ENVIRONMENT "SOFTGPU_STREAMS=${order};SOFTGPU_DEVICES=2")
  endforeach()
endforeach()

# After a fork the thread sanitizer sees nothing: what is to die does so in a process of its own.
if(SB_SANITIZE MATCHES thread)
  get_property(own DIRECTORY PROPERTY TESTS)
  list(FILTER own INCLUDE REGEX "^softgpu_")
  set_property(TEST ${own} APPEND PROPERTY ENVIRONMENT GTEST_DEATH_TEST_STYLE=threadsafe)
endif()

# What scripts/test-softgpu.sh runs, without the rest of the program's tests.
add_custom_target(softgpu_own_tests)
add_dependencies(softgpu_own_tests
  softgpu_device_functions_test softgpu_engine_test softgpu_memory_test softgpu_nccl_test softgpu_products_test softgpu_streams_test)
add_custom_target(softgpu_tests)
add_dependencies(softgpu_tests softgpu_own_tests
  attention_cuda_test attention_hopper_test attention_select_test comm_device_test cuda_ranks_test cuda_ring_test
  cuda_training_test device_test eval_test model_test nccl_ranks_test ops_test)
