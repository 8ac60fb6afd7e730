# cmake -D BUILD=<build folder> -D WORK=<scratch folder> -D CC= -D CXX= [-D FLAGS=] -P run.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REPLACE ";" " " line "${ARGN}")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${line}\nfailed (${code}):\n${output}")
  endif()
  message(STATUS "ok: ${line}")
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix ${WORK}/cpp ${WORK}/c)
foreach(component library headers tools)
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix --component ${component})
endforeach()
foreach(language cpp c)
  run(${CMAKE_COMMAND} -G Ninja -S ${CMAKE_CURRENT_LIST_DIR}/${language} -B ${WORK}/${language}
      -D CMAKE_PREFIX_PATH=${WORK}/prefix -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_C_COMPILER=${CC}
      -D CMAKE_CXX_FLAGS=${FLAGS} -D CMAKE_C_FLAGS=${FLAGS})
  run(${CMAKE_COMMAND} --build ${WORK}/${language})
  run(${WORK}/${language}/outside_${language})
endforeach()
run(${WORK}/cpp/example)
run(${WORK}/prefix/bin/moire info)
